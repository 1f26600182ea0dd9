"""Ranks that are threads of one process: what `deltawire.attest` exchanges, without torch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class Meeting:
    """Where ``count`` threads wait for each other. Fails at once if one has ended meanwhile: it
    would never come."""

    def __init__(self, count, timeout=60):
        self._missing = self._count = count
        self._timeout = timeout
        self._met = self._ended = 0
        self._changed = threading.Condition()

    def wait(self):
        with self._changed:
            met = self._met
            self._missing -= 1
            if not self._missing:
                self._missing = self._count
                self._met += 1
                self._changed.notify_all()
                return
            self._changed.wait_for(lambda: self._met > met or self._ended, self._timeout)
            assert self._met > met, "a rank waits for another one that has ended, or does not come"

    def end(self):
        """Says that a thread comes no more."""
        with self._changed:
            self._ended += 1
            self._changed.notify_all()


class ThreadRanks:
    """One of ``count`` ranks that share ``board``, a list with a place for each."""

    def __init__(self, number, count, board, meeting):
        self.number = number
        self.count = count
        self._board = board
        self._meeting = meeting

    def gather(self, data):
        self._board[self.number] = data
        self._meeting.wait()
        found = list(self._board)
        self._meeting.wait()
        return found

    def add_up(self, words):
        return np.sum(self.gather(words), axis=0, dtype=np.int64)


def on_ranks(work, count):
    """Returns ``work(ranks)`` of each rank; the first error is raised."""
    board, meeting = [None] * count, Meeting(count)

    def run(ranks):
        try:
            return work(ranks)
        finally:
            meeting.end()

    with ThreadPoolExecutor(count) as pool:
        ranks = [ThreadRanks(number, count, board, meeting) for number in range(count)]
        return list(pool.map(run, ranks))
