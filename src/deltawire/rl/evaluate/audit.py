"""The proof at the end of a run, from what lies in the bucket and not from what anybody logged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync import newest_version, read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.rollouts import MAX_GROUP_BYTES, decode_group


@dataclass
class Consumption:
    """What every version after 0 was trained on.

    ``staleness`` holds, for each version, one integer a consumed group: the version trained from
    minus the oldest version that drew one of the group's tokens, read from the tokens themselves.
    ``repeated`` counts groups that more than one version consumed, ``lost`` those that are no
    longer there or not readable.
    """

    versions: int = 0
    staleness: dict[int, list[int]] = field(default_factory=dict)
    repeated: int = 0
    lost: int = 0

    @property
    def groups(self) -> int:
        """How many groups were read back."""
        return sum(map(len, self.staleness.values()))

    @property
    def staleness_max(self) -> int:
        """The largest staleness of any consumed group."""
        return max((max(values, default=0) for values in self.staleness.values()), default=0)


def audit_consumption(bucket: Bucket) -> Consumption:
    """Read every manifest's metadata, and every group that it names."""
    found = Consumption()
    seen: set[tuple[str, int]] = set()
    for version, metadata in all_metadata(bucket):
        found.versions = version
        found.staleness[version] = []
        for worker, sequence in metadata.consumed:
            found.repeated += (worker, sequence) in seen
            seen.add((worker, sequence))
            key = keys.rollout(worker, sequence)
            try:
                data = bucket.get(key, limit=MAX_GROUP_BYTES)
                if data is None:
                    raise CorruptError("a consumed group is missing", run=bucket.url, key=key)
                oldest = decode_group(data, run=bucket.url, key=key).oldest_version
            except CorruptError:
                found.lost += 1
                continue
            found.staleness[version].append(version - 1 - oldest)
    return found


@dataclass
class Fates:
    """What became of every group that was ever stored.

    ``waiting`` ones are neither consumed nor dropped and may still be; ``forgotten`` ones should
    have been: too old by now, though a later group of the same worker was settled.
    """

    consumed: int = 0
    dropped: int = 0
    waiting: int = 0
    forgotten: list[tuple[str, int]] = field(default_factory=list)
    twice: list[tuple[str, int]] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """All of them."""
        return self.consumed + self.dropped + self.waiting + len(self.forgotten)


def audit_fates(bucket: Bucket, *, max_staleness: int) -> Fates:
    """Compare what lies under ``rollouts/`` with what the manifests settled."""
    found = Fates()
    settled: set[tuple[str, int]] = set()
    newest = 0
    for version, metadata in all_metadata(bucket):
        newest = version
        found.consumed += len(metadata.consumed)
        found.dropped += len(list(metadata.dropped_groups()))
        for named in metadata.settled_groups():
            if named in settled:
                found.twice.append(named)
            settled.add(named)
    last: dict[str, int] = {}
    for worker, sequence in settled:
        last[worker] = max(last.get(worker, -1), sequence)
    for key in bucket.list(keys.ROLLOUTS):
        group = keys.group_of(key)
        if group is None or group in settled:
            continue
        worker, sequence = group
        later = sequence < last.get(worker, -1)
        if later and _too_old(bucket, key, newest - 1 - max_staleness):
            found.forgotten.append(group)
        else:
            found.waiting += 1
    return found


def _too_old(bucket: Bucket, key: str, oldest: int) -> bool:
    try:
        data = bucket.get(key, limit=MAX_GROUP_BYTES)
        return data is None or decode_group(data, run=bucket.url, key=key).oldest_version < oldest
    except CorruptError:
        return True


def all_metadata(bucket: Bucket) -> Iterator[tuple[int, CommitMetadata]]:
    """What each committed version after 0 consumed; raises `CorruptError` for a broken chain."""
    run, newest = read_run(bucket), newest_version(bucket)
    if run is None or newest is None:
        return
    for version in range(1, newest + 1):
        manifest = read_manifest(bucket, run, version)
        if manifest is None:
            raise CorruptError("a manifest is missing", run=bucket.url, version=version)
        yield version, CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
