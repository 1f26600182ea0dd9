"""Rollbacks that a trainer follows: which decision is next, and what is kept until then.

::

    decision n: rollback to version S ─▶ masters and optimizer of S ─▶ version N + 1 (create)
                                                                        names n: followed once

One create commits it: the metadata of version N + 1 names the decision. A trainer that dies before
finds the decision again; one that dies after finds the record. Versions S + 1 to N are withdrawn,
and what they consumed stays consumed.
"""

from __future__ import annotations

import time
from functools import partial

from deltawire.errors import RetryError
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import Bucket
from deltawire.sync import read_history, read_manifest
from deltawire.sync.chain.evidence import listed_twice, require_evidence
from deltawire.train.checkpoint_folders import (
    checkpoint_versions,
    keep_checkpoint,
    kept_checkpoints,
    release_checkpoint,
)
from deltawire.wire import keys
from deltawire.wire.decisions import UNDECIDED, Decision, RestoreRecord
from deltawire.wire.ledger import CommitMetadata, ranges_of
from deltawire.wire.run import Run

POLL_EVERY_S = 2.0


class RollbackWatch:
    """The decisions about a run, as its trainer sees them.

    ``checkpoints`` is how many states the trainer keeps anyway. States at or before the serving
    version, the candidate and the hold-back version are kept on top, so that each can be restored.

    Example::

        watch = RollbackWatch(bucket, run, checkpoints=2)
        watch.poll(version=trainer.version)
    """

    def __init__(self, bucket: Bucket, run: Run, *, checkpoints: int) -> None:
        self._bucket, self._run = bucket, run
        self._checkpoints = checkpoints
        self._log = DecisionLog(bucket, run.id)
        self._asked_at = float("-inf")
        self._kept_for = -1
        self._followed = -1
        """The newest decision that needs no restore any more."""

    @property
    def oldest_served(self) -> int | None:
        """The oldest version that the newest decision or a rollback after it serves; None without
        decisions."""
        newest = self._log.newest
        if newest is None:
            return None
        earlier = self._log.before_serving()
        served = [newest.serving, *([earlier.serving] if earlier else [])]
        if newest.hold_back is not None:
            served.append(newest.hold_back)
        return min((one.version for one in served if not one.upstream), default=None)

    def poll(self, *, version: int) -> Decision | None:
        """Returns the rollback that a trainer at ``version`` must follow now; None if there is
        none. Asks the store every `POLL_EVERY_S` only; an outage is no reason to stop training."""
        now = time.monotonic()
        if now - self._asked_at < POLL_EVERY_S:
            return None
        self._asked_at = now
        try:
            self._log.poll()
            self._keep_states()
            return self._next(version)
        except RetryError:
            return None

    def followed(self, decision: Decision) -> None:
        """Notes that a version restores what ``decision`` asked for."""
        self._followed = decision.number

    def record(self, decision: Decision, *, version: int) -> RestoreRecord:
        """Returns the record of a restore by a trainer at ``version``, as far as the bucket says
        it: the withdrawn versions and what they consumed."""
        first = decision.serving.version + 1
        consumed: list[tuple[str, int]] = []
        for manifest in read_history(self._bucket, self._run, after=first - 1, to=version):
            if not manifest.pruned:
                number = manifest.version
                found = CommitMetadata.of(manifest.metadata, run=self._bucket.url, version=number)
                consumed += found.consumed
        return RestoreRecord(
            decision=decision.number,
            restored=decision.serving,
            first=first,
            last=version,
            state="weights",
            groups=ranges_of(consumed),
        )

    def _next(self, version: int) -> Decision | None:
        settled = [one for one in self._log.decisions if one.verdict not in UNDECIDED]
        decision = settled[-1] if settled else None
        if decision is None or decision.number <= self._followed:
            return None
        # An upstream has no weights to go back to, and its failure says nothing of the run's.
        away = decision.serving.upstream or (decision.candidate and decision.candidate.upstream)
        if decision.verdict != "rollback" or away or decision.serving.version >= version:
            self._followed = decision.number
            return None
        if self._is_restored(decision, version) or not self._names_a_version(decision):
            self._followed = decision.number
            return None
        return decision

    def _is_restored(self, decision: Decision, version: int) -> bool:
        """Returns whether a version up to ``version`` has the record of this decision."""
        assert decision.candidate is not None
        after = max(decision.candidate.version, decision.serving.version)
        for manifest in read_history(self._bucket, self._run, after=after, to=version):
            number = manifest.version
            found = RestoreRecord.of(manifest.metadata, run=self._bucket.url, version=number)
            if found is not None and found.decision >= decision.number:
                return True
        return False

    def _names_a_version(self, decision: Decision) -> bool:
        """Returns whether the version to restore has the digest that the decision states; gateways
        refuse such a decision too."""
        serving = decision.serving
        read = partial(read_manifest, self._bucket, self._run, serving.version)
        key = keys.manifest(serving.version)
        manifest = require_evidence(self._bucket, key, read, so="the rollback waits")
        return manifest is not None and manifest.digest == serving.digest

    def _keep_states(self) -> None:
        """Keep the states from which the serving version and the candidate can be restored."""
        newest = self._log.newest
        if newest is None or newest.number == self._kept_for:
            return
        last = keys.live_decision(self._log.next_number - 1)
        if listed_twice(self._bucket, keys.LIVE_DECISIONS, after=last):
            return  # There are newer ones, which may need other states: the next poll reads them.
        stored = sorted({v for _ in range(2) for v in checkpoint_versions(self._bucket)})
        named = [
            one for one in (newest.serving, newest.candidate, newest.hold_back) if one is not None
        ]
        wanted = {
            max((one for one in stored if one <= served.version), default=None)
            for served in named
            if not served.upstream
        }
        kept = kept_checkpoints(self._bucket)
        for version in wanted - kept:
            if version is not None:
                keep_checkpoint(self._bucket, version)
        for version in kept - wanted:
            release_checkpoint(self._bucket, version, keep=self._checkpoints)
        self._kept_for = newest.number
