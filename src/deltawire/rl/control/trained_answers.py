"""Trained answers: which answer of a user each learner's group was made of, so that the trainer
takes no answer twice.

Learners share answers among themselves (`deltawire.live.learning.owners`), by what each knows of
the others. A learner that stood still for minutes may know less. The trainer is one process, so
its word is final: of two groups that hold the same answer it takes the one that it read first.
"""

from __future__ import annotations

import threading

from deltawire.errors import CorruptError
from deltawire.rl.control.lineages import read_lineage, read_lineages
from deltawire.rl.control.released_groups import ReleasedGroups
from deltawire.store import Bucket
from deltawire.wire.ledger import Ledger
from deltawire.wire.rollouts import LIVE_TASK, Group
from deltawire.wire.run import Run

READS = 3
"""A lineage counts as damaged only if every read finds it damaged."""
_DIGITS = 16


class TrainedAnswers:
    """Refuses groups that share an answer with a group that was read before, or settled.

    Lineages of settled groups are read once, before the first group of a learner, so a run without
    learners costs nothing. Groups that a rebuild released do not count
    (`deltawire.rl.control.released_groups`). 64 bits of an answer's id are kept: two ids that agree
    in them cost a group, once in 10^7 runs of 10^6 answers.

    Example::

        trained = TrainedAnswers(bucket, run, ledger)
        answers = trained.read(group, 3)      # by any thread
        trained.claim(group, 3, answers)      # why the group is refused; empty if it is not
    """

    def __init__(self, bucket: Bucket, run: Run, ledger: Ledger) -> None:
        self._bucket = bucket
        self._ledger = ledger
        self._released = ReleasedGroups(bucket, run)
        self._holders: dict[int, tuple[str, int]] | None = None
        self._lock = threading.Lock()

    def read(self, group: Group, sequence: int) -> list[str] | None:
        """Returns the answers of a learner's group; None if its lineage cannot be read.

        Groups of other workers have none. Raises `RetryError`.
        """
        if not _is_learned(group):
            return []
        with self._lock:
            if self._holders is None:
                self._holders = self._settled_answers()
        for _ in range(READS):
            try:
                lineage = read_lineage(self._bucket, group.worker, sequence)
            except CorruptError:
                continue
            if lineage is not None and len(lineage.answers) == len(group.trajectories):
                return [one.answer for one in lineage.answers]
        return None

    def claim(self, group: Group, sequence: int, answers: list[str] | None) -> str:
        """Takes a group's answers, as `read` gave them; returns why the group is refused.

        Raises `RetryError`; the same call may then be repeated.
        """
        if not _is_learned(group):
            return ""
        if answers is None:
            return "its lineage cannot be read, so its answers may be those of another group"
        place, holders = (group.worker, sequence), self._holders
        assert holders is not None
        numbers = [int(one[-_DIGITS:], 16) for one in answers]
        if len(set(numbers)) < len(numbers):
            return "it holds an answer twice"
        held = {holders[number] for number in numbers if holders.get(number, place) != place}
        if held - self._released.groups:
            self._released.poll()
        if others := held - self._released.groups:
            worker, number = min(others)
            return f"group {number} of {worker} holds one of its answers"
        holders.update(dict.fromkeys(numbers, place))
        return ""

    def _settled_answers(self) -> dict[int, tuple[str, int]]:
        self._released.poll()
        found: dict[int, tuple[str, int]] = {}
        for lineage in read_lineages(self._bucket):
            place = lineage.worker, lineage.sequence
            if self._ledger.settled(*place) and place not in self._released.groups:
                numbers = [int(one.answer[-_DIGITS:], 16) for one in lineage.answers]
                found.update(dict.fromkeys(numbers, place))
        return found


def _is_learned(group: Group) -> bool:
    return group.task == group.family == LIVE_TASK
