"""Keeps what is needed to compute some intervals of a run again: groups, and states at both ends.

An interval lies between two consecutive states of the trainer. Of all intervals of the run, those
with the ``keep`` lowest ranks are kept: the rank is the BLAKE3 of the run's id and of the digests
at both ends, so every interval has the same chance, the rank is not known before the interval ends,
and every reader of the manifests can compute it. An interval that a new one replaces loses the mark
at its end, then its groups, then its other mark. The next checkpoint removes its states.

Each interval is marked before the state at its end is stored, because that may remove the one at
its beginning. A stop at any point is harmless: the next checkpoint chooses again, from the marks.
"""

from __future__ import annotations

from functools import partial

from blake3 import blake3

from deltawire.errors import CorruptError
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.store import Bucket, in_parallel
from deltawire.sync import read_manifest
from deltawire.sync.chain.evidence import require_evidence, unreadable
from deltawire.sync.chain.objects import versions_listed_twice
from deltawire.train.checkpoint_folders import marked_intervals, stored_twice
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

Interval = tuple[int, int]
CONSEQUENCE = "no interval was given up"


class ProofRetention:
    """Chooses the ``keep`` intervals of a run that are kept; 0 keeps none.

    Example::

        proofs = ProofRetention(bucket, run, keep=12, rollouts=retention)
        proofs.choose(40)  # before the state of version 40 is stored
    """

    def __init__(self, bucket: Bucket, run: Run, *, keep: int, rollouts: RolloutRetention) -> None:
        self._bucket, self._run, self._keep, self._rollouts = bucket, run, keep, rollouts
        self._digests: dict[int, str] = {}
        """Of the versions at the ends of marked intervals; they never change."""

    @property
    def is_idle(self) -> bool:
        """Returns whether no interval is kept or to be kept; raises as `marked_intervals`."""
        return not self._keep and not marked_intervals(self._bucket, so=CONSEQUENCE)

    def choose(self, version: int) -> None:
        """Chooses again, with the interval that ends at ``version``, which is committed and whose
        state is stored after this. Raises `UnreadableError`, before anything is given up, if a mark
        or a manifest cannot be read that decides, and `RetryError`."""
        stored = stored_twice(self._bucket)
        # If its state is stored, it was chosen before that, and the state before may be gone.
        is_new = version not in stored
        stored |= {version}
        if self._keep and is_new and (origin := self._before(version, stored)) is not None:
            # First, so that it is kept until it is known that it need not be.
            self._bucket.put(keys.checkpoint_interval(origin, version), b"")
            self._bucket.put(keys.checkpoint_interval(version, origin), b"")
        marked = marked_intervals(self._bucket, so=CONSEQUENCE)
        # A trainer that stopped between the marks and the state ends the interval elsewhere.
        complete = [ends for ends, kept in marked.items() if kept and ends[1] in stored]
        if self._keep:
            self._read_digests({version for ends in complete for version in ends})
        chosen = set(sorted(complete, key=self._rank)[: self._keep]) if self._keep else set()
        for interval in sorted(marked.keys() - chosen):
            self._give_up(interval, chosen)

    def _before(self, version: int, stored: set[int]) -> int | None:
        """Returns the version of the state before ``version``, 0 for the start; None if that is
        gone."""
        before = max((earlier for earlier in stored if earlier < version), default=0)
        if before == 0 and 0 not in stored:
            start = self._manifest(0)
            return None if start is None or start.pruned else 0
        return before

    def _rank(self, interval: Interval) -> str:
        ends = " ".join(self._digests[version] for version in interval)
        return blake3(f"{self._run.id} {ends}".encode()).hexdigest()

    def _read_digests(self, versions: set[int]) -> None:
        new = sorted(versions - self._digests.keys())
        self._digests |= zip(new, in_parallel(self._bucket, self._digest, new), strict=True)

    def _digest(self, version: int) -> str:
        manifest = self._manifest(version)
        if manifest is None or manifest.pruned:
            key = keys.manifest(version)
            error = CorruptError(
                "a version of a kept interval is gone", run=self._bucket.url, key=key
            )
            raise unreadable(self._bucket, key, error, so=CONSEQUENCE)
        return manifest.digest

    def _manifest(self, version: int) -> Manifest | None:
        read = partial(read_manifest, self._bucket, self._run, version)
        return require_evidence(self._bucket, keys.manifest(version), read, so=CONSEQUENCE)

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
