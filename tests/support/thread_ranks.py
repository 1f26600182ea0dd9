"""Ranks that are threads of one process: what `deltawire.attest` exchanges, without torch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class ThreadRanks:
    """One of ``count`` ranks that share ``board``, a list with a place for each."""

    def __init__(self, number, count, board, barrier):
        self.number = number
        self.count = count
        self._board = board
        self._barrier = barrier

    def gather(self, data):
        self._board[self.number] = data
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def add_up(self, words):
        return np.sum(self.gather(words), axis=0, dtype=np.int64)


def on_ranks(work, count):
    """Returns ``work(ranks)`` of each rank; the first error is raised."""
    board, barrier = [None] * count, threading.Barrier(count, timeout=60)
    with ThreadPoolExecutor(count) as pool:
        ranks = [ThreadRanks(number, count, board, barrier) for number in range(count)]
        return list(pool.map(work, ranks))
