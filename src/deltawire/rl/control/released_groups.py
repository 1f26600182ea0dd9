"""Rebuilds: which groups no longer count as trained, because their versions were withdrawn to
forget a user (`deltawire.live.erasure.rebuilding`). Their other answers may be grouped again.

A rollback for any other reason releases nothing: what its versions consumed stays consumed.
"""

from __future__ import annotations

from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import Bucket
from deltawire.sync import read_history
from deltawire.wire.decisions import FORGETS, Decision, RestoreRecord
from deltawire.wire.run import Run


class ReleasedGroups:
    """The groups, as (worker, sequence), that rebuilds have released so far.

    A group is released once the trainer has restored the earlier weights: until then it may still
    be part of the newest version. Each version is read once, so a poll that meets nothing new takes
    two requests, however long the trainer needs.

    Example::

        released = ReleasedGroups(bucket, run)
        released.poll()
        ("live", 3) in released.groups
    """

    def __init__(self, bucket: Bucket, run: Run) -> None:
        self.groups: set[tuple[str, int]] = set()
        self._bucket, self._run = bucket, run
        self._log = DecisionLog(bucket, run.id)
        self._seen = 0
        self._open: list[Decision] = []
        self._read_to: int | None = None
        self._restored: dict[int, RestoreRecord] = {}
        """The restores of the versions up to ``_read_to``, by decision."""

    def poll(self) -> bool:
        """Reads new decisions and what the trainer restored; returns whether groups were released.

        Raises `RetryError` if the store does not answer.
        """
        self._log.poll()
        new = self._log.decisions[self._seen :]
        self._seen += len(new)
        self._open += [one for one in new if one.verdict == "rollback" and FORGETS in one.evidence]
        if not self._open:
            return False
        self._read_versions(self._open[0])
        before = len(self.groups)
        for decision in self._open:
            if (record := self._restored.get(decision.number)) is not None:
                for worker, first, count in record.groups:
                    self.groups |= {(worker, first + place) for place in range(count)}
        self._open = [one for one in self._open if one.number not in self._restored]
        return len(self.groups) > before

    def paused_until(self) -> float:
        """Returns until when learning pauses, as the decisions that `poll` read say; 0 if it does
        not."""
        return self._log.paused_until()

    def _read_versions(self, first: Decision) -> None:
        """Reads the versions that are new; at first those after the ``first`` decision was made.

        The version that restores by a decision is newer than any that the decision names.
        """
        if self._read_to is None:
            candidate = first.serving if first.candidate is None else first.candidate
            self._read_to = max(first.serving.version, candidate.version)
        # A newest version that cannot be read now is read by a later poll: nothing is released.
        history = read_history(self._bucket, self._run, after=self._read_to, complete=False)
        for manifest in history:
            version = manifest.version
            record = RestoreRecord.of(manifest.metadata, run=self._bucket.url, version=version)
            if record is not None:
                self._restored[record.decision] = record
            self._read_to = version
