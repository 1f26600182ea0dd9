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
    be part of the newest version.

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

    def poll(self) -> bool:
        """Reads new decisions and what the trainer restored; returns whether groups were released.

        Raises `RetryError` if the store does not answer.
        """
        self._log.poll()
        new = self._log.decisions[self._seen :]
        self._seen += len(new)
        self._open += [one for one in new if one.verdict == "rollback" and FORGETS in one.evidence]
        before = len(self.groups)
        self._open = [one for one in self._open if not self._release(one)]
        return len(self.groups) > before

    def _release(self, decision: Decision) -> bool:
        """Releases what the version that restores by ``decision`` withdrew; returns whether there
        is such a version."""
        for manifest in read_history(self._bucket, self._run, after=decision.serving.version):
            record = RestoreRecord.of(
                manifest.metadata, run=self._bucket.url, version=manifest.version
            )
            if record is not None and record.decision == decision.number:
                for worker, first, count in record.groups:
                    self.groups |= {(worker, first + place) for place in range(count)}
                return True
        return False
