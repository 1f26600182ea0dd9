"""Keeps what computing some intervals of a run again needs: their groups, and states at both ends.

An interval lies between two consecutive states of the trainer. Of all intervals of the run, those
with the ``keep`` lowest ranks are kept: the rank is the BLAKE3 of the run's id and of the digests
at both ends, so every interval has the same chance, nobody knows it before the interval ends, and
every reader of the manifests can compute it. When a new interval takes the place of another, that
one's mark at its end is deleted, its groups, its other mark, and, with the next checkpoint, its
states.

Each interval is marked before the state at its end is stored, because that may remove the one at
its beginning. A stop at any point is harmless: the next checkpoint chooses again, from the marks.
"""

from __future__ import annotations

from functools import partial

from blake3 import blake3

from deltawire.errors import CorruptError
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.store import Bucket
from deltawire.sync import read_manifest
from deltawire.sync.chain.evidence import require_evidence, unreadable
from deltawire.sync.chain.objects import versions_listed_twice
from deltawire.train.checkpoint import marked_intervals, stored_twice
from deltawire.wire import keys
from deltawire.wire.run import Run

Interval = tuple[int, int]
SO = "no interval was given up"


class ProofRetention:
    """Chooses the ``keep`` intervals of a run that are kept; 0 keeps none.

    Example::

        proofs = ProofRetention(bucket, run, keep=12, rollouts=retention)
        proofs.choose(40)  # before the state of version 40 is stored
    """

    def __init__(self, bucket: Bucket, run: Run, *, keep: int, rollouts: RolloutRetention) -> None:
        self._bucket, self._run, self._keep, self._rollouts = bucket, run, keep, rollouts

    def choose(self, version: int) -> None:
        """Chooses again, with the interval that ends at ``version``, which is committed and whose
        state is stored after this. Raises `UnreadableError`, before anything is given up, if a mark
        or a manifest cannot be read that decides, and `RetryError`."""
        stored = stored_twice(self._bucket) | {version}
        if self._keep and (origin := self._before(version, stored)) is not None:
            # First, so that it is kept until it is known that it need not be.
            self._bucket.put(keys.checkpoint_interval(origin, version), b"")
            self._bucket.put(keys.checkpoint_interval(version, origin), b"")
        marked = marked_intervals(self._bucket, so=SO)
        # A trainer that stopped between the marks and the state ends the interval elsewhere.
        found = [one for one, kept in marked.items() if kept and one[1] in stored]
        chosen = set(sorted(found, key=self._rank)[: self._keep])
        for interval in sorted(marked.keys() - chosen):
            self._give_up(interval, chosen)

    def _before(self, version: int, stored: set[int]) -> int | None:
        """Returns the version of the state before ``version``, 0 for the start; None if that is
        gone."""
        before = max((one for one in stored if one < version), default=0)
        if before == 0 and 0 not in stored:
            start = read_manifest(self._bucket, self._run, 0)
            return None if start is None or start.pruned else 0
        return before

    def _rank(self, interval: Interval) -> str:
        ends = " ".join(self._digest(version) for version in interval)
        return blake3(f"{self._run.id} {ends}".encode()).hexdigest()

    def _digest(self, version: int) -> str:
        key = keys.manifest(version)
        read = partial(read_manifest, self._bucket, self._run, version)
        manifest = require_evidence(self._bucket, key, read, so=SO)
        if manifest is None or manifest.pruned:
            error = CorruptError(
                "a version of a kept interval is gone", run=self._bucket.url, key=key
            )
            raise unreadable(self._bucket, key, error, so=SO)
        return manifest.digest

    def _give_up(self, interval: Interval, chosen: set[Interval]) -> None:
        origin, last = interval
        floor = self._rollouts.floor
        self._bucket.delete(keys.checkpoint_interval(last, origin))  # It is not promised any more.
        for version in versions_listed_twice(self._bucket, newer_than=origin):
            if version > min(last, floor - 1):
                break
            if not any(begin < version <= end for begin, end in chosen):
                self._rollouts.drop(version)
        self._bucket.delete(keys.checkpoint_interval(origin, last))
