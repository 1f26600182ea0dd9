"""Pace: how many groups a learner stores ahead of the trainer.

A stored group waits for its step, and its answers age by one version with each step. The trainer
grants credits for (S+1)·P groups, S the largest staleness and P the groups of a step; a learner
that used them all would have every answer trained on S versions late. It keeps P groups instead,
those of the step that comes or runs, and in the last quarter of a step P more, so that the trainer
does not wait. So a group is trained on from the version at which it was stored or the next one.
Several learners divide P. With S = 0 there is only the first part.
"""

from __future__ import annotations

import statistics
from collections import deque

from deltawire.config import TrainConfig
from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync import read_manifest
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.run import Run

STEPS = 5
"""The length of a step is the median of so many."""
AHEAD_AFTER = 0.75
"""Groups for the next step are stored after this share of a step."""
LATE_FROM = 4
"""With this staleness and more, an answer may also meet a version that the learner does not know
yet."""


class Pace:
    """The groups of one learner that are stored and not settled, and the trainer's steps.

    ``first`` is the number of the first group that counts; earlier ones are taken as settled.
    Times are seconds of the caller's monotonic clock.

    Example::

        pace = Pace(bucket, run, "live", config.train, first=12)
        pace.poll(version=7, now=time.monotonic())
        pace.may_store(13, now=time.monotonic()), pace.oldest_version(13)
    """

    def __init__(
        self, bucket: Bucket, run: Run, worker: str, train: TrainConfig, *, first: int
    ) -> None:
        self.version = 0
        self._bucket, self._run, self._worker = bucket, run, worker
        self._groups, self._staleness = train.groups_per_step, train.max_staleness
        self._first = first
        self._settled: set[int] = set()
        self._read_to: int | None = None
        self._stepped_at: float | None = None
        self._steps: deque[float] = deque(maxlen=STEPS)

    def poll(self, version: int, now: float) -> None:
        """Takes the trainer's version, and reads what new versions settled. Raises `RetryError`.

        A manifest that cannot be read is read again by the next polls, until its groups would be
        too old in any case.
        """
        if self._read_to is None or version < self._read_to:
            self._read_to = self.version = version
        while self._read_to < version:
            try:
                manifest = read_manifest(self._bucket, self._run, self._read_to + 1)
            except CorruptError:
                # Nothing is deleted for it; groups that it settled count as waiting meanwhile.
                if version - self._read_to <= self._staleness + 1:
                    break
                manifest = None
            if manifest is not None:
                step = CommitMetadata.of(
                    manifest.metadata, run=self._bucket.url, version=manifest.version
                )
                self._settled |= {
                    number
                    for worker, number in step.settled_groups()
                    if worker == self._worker and number >= self._first
                }
            self._read_to += 1
            if self._stepped_at is not None:
                self._steps.append(now - self._stepped_at)
            self._stepped_at = now
        self.version = version

    def waiting(self, stored: int) -> int:
        """Returns how many groups below number ``stored`` are not settled."""
        return stored - self._first - len(self._settled)

    def may_store(self, stored: int, *, now: float, learners: int = 1) -> bool:
        """Returns whether the group of number ``stored`` would be trained on soon enough."""
        share, waiting = -(-self._groups // learners), self.waiting(stored)
        if waiting < share:
            return True
        if self._staleness == 0 or waiting >= 2 * share:
            return False
        if self._stepped_at is None or not self._steps:
            return True
        return now - self._stepped_at >= AHEAD_AFTER * statistics.median(self._steps)

    def oldest_version(self, stored: int, *, learners: int = 1) -> int:
        """Returns the oldest version that may have drawn an answer of the group of number
        ``stored``, so that the group is not too old when its step comes."""
        steps = int(self.waiting(stored) >= -(-self._groups // learners))
        return self.version + steps + (self._staleness >= LATE_FROM) - self._staleness
