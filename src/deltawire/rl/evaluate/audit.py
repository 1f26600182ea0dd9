"""Audit of a run: reads from the bucket what was trained on, independently of any log."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from deltawire.errors import CorruptError
from deltawire.rl.control.rollout_reader import read_group
from deltawire.runtime.retained import read_retained
from deltawire.store import Bucket
from deltawire.sync import find_run, read_history
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.rollouts import MAX_GROUP_BYTES, decode_group

READERS = 16
SAMPLED = 4096
"""Groups that an audit reads; of more, a random sample."""


@dataclass
class Consumption:
    """The groups that every version after 0 was trained on.

    ``consumed`` counts them by the manifests. ``staleness`` holds, for each version, one integer a
    group that was read: the version trained from, minus the oldest version that sampled one of the
    group's tokens, read from the tokens themselves. ``repeated`` counts groups that several
    versions consumed, ``lost`` those that are missing, unreadable, or not the ones whose hashes the
    manifest states, and ``trimmed`` those that retention may have deleted, which are not read.
    """

    versions: int = 0
    consumed: int = 0
    staleness: dict[int, list[int]] = field(default_factory=dict)
    repeated: int = 0
    lost: int = 0
    trimmed: int = 0

    def plus(self, other: Consumption) -> Consumption:
        """Returns the sums over both, which are lines of one run: the staleness of each version of
        either, and the number of versions of both."""
        numbers = self.staleness.keys() | other.staleness.keys()
        return Consumption(
            versions=self.versions + other.versions,
            consumed=self.consumed + other.consumed,
            staleness={
                number: [*self.staleness.get(number, []), *other.staleness.get(number, [])]
                for number in sorted(numbers)
            },
            repeated=self.repeated + other.repeated,
            lost=self.lost + other.lost,
            trimmed=self.trimmed + other.trimmed,
        )

    @property
    def groups(self) -> int:
        """The number of groups that were read."""
        return sum(map(len, self.staleness.values()))

    @property
    def staleness_max(self) -> int:
        """The largest staleness of any group that was read."""
        return max((max(values, default=0) for values in self.staleness.values()), default=0)


def audit_consumption(
    bucket: Bucket, *, sampled: int = SAMPLED, rng: random.Random | None = None
) -> Consumption:
    """Reads the metadata of every manifest, and the groups that it names.

    Of more than ``sampled`` groups a random sample is read, several at a time, and compared with
    the hashes in the manifests: a share p of lost groups stays unnoticed with probability
    (1 - p)^sampled.
    """
    found = Consumption()
    before = 0
    seen: set[tuple[str, int]] = set()
    kept_from = read_retained(bucket).rollouts
    wanted: list[tuple[int, int, str, int, str]] = []
    for version, metadata in all_metadata(bucket):
        found.versions = version
        found.staleness[version] = []
        found.consumed += len(metadata.consumed)
        for place, (worker, sequence) in enumerate(metadata.consumed):
            found.repeated += (worker, sequence) in seen
            seen.add((worker, sequence))
            if version < kept_from:
                found.trimmed += 1
            else:
                digest = metadata.hashes[place] if metadata.hashes else ""
                wanted.append((version, before, worker, sequence, digest))
        before = version
    if len(wanted) > sampled:
        wanted = (rng or random.Random()).sample(wanted, sampled)

    def oldest_in(named: tuple[int, int, str, int, str]) -> int | None:
        _, _, worker, sequence, digest = named
        try:
            read = read_group(bucket, worker, sequence, expected=digest)
        except CorruptError:
            return None
        return None if read is None else read[0].oldest_version

    with ThreadPoolExecutor(READERS, "audit") as readers:
        for named, oldest in zip(wanted, readers.map(oldest_in, wanted), strict=True):
            if oldest is None:
                found.lost += 1
            else:
                found.staleness[named[0]].append(named[1] - oldest)
    return found


@dataclass
class Fates:
    """The fate of every group that was ever stored.

    ``waiting`` groups are neither consumed nor dropped, and may still be. ``forgotten`` groups
    should have been: they are too old now, and a later group of the same worker was settled.
    ``twice`` names groups that were settled more than once.
    """

    consumed: int = 0
    dropped: int = 0
    waiting: int = 0
    forgotten: list[tuple[str, int]] = field(default_factory=list)
    twice: list[tuple[str, int]] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """The number of all groups."""
        return self.consumed + self.dropped + self.waiting + len(self.forgotten)


def audit_fates(bucket: Bucket, *, max_staleness: int) -> Fates:
    """Compares the objects under ``rollouts/`` with the groups that the manifests settled."""
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
    """The metadata of each committed version after 0; raises `CorruptError` for a broken chain."""
    run = find_run(bucket)
    if run is None:
        return
    # An object above the newest version that can be read is no version to any reader.
    for manifest in read_history(bucket, run, complete=False, readers=READERS):
        version = manifest.version
        yield version, CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
