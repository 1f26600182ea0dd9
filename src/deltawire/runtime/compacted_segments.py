"""Compacted segments: lists and reads them, and their indexes (`deltawire.wire.compacted`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from deltawire.store import Bucket, ObjectMeta
from deltawire.sync.chain.evidence import require_evidence
from deltawire.wire import keys
from deltawire.wire.compacted import (
    MAX_COMPACTED_BYTES,
    MAX_INDEX_BYTES,
    CompactedIndex,
    CompactedName,
    NumberedRow,
    Stream,
    decode_compacted,
    decode_index,
)


@dataclass(frozen=True)
class CompactedListing:
    """The compacted segments of one owner, their indexes, and those that are announced, by name:
    two listings of each."""

    stream: Stream
    owner: str
    segments: dict[CompactedName, ObjectMeta] = field(default_factory=dict)
    indexes: dict[CompactedName, ObjectMeta] = field(default_factory=dict)
    pending: dict[CompactedName, ObjectMeta] = field(default_factory=dict)

    @property
    def names(self) -> list[CompactedName]:
        """All names of which there is a segment or an index, the oldest first."""
        return sorted({*self.segments, *self.indexes}, key=lambda one: (one.span, one.name))


def list_compacted(bucket: Bucket, stream: Stream, owner: str) -> CompactedListing:
    """Lists the compacted segments of an owner; raises `RetryError`.

    Each is listed before what is created after it.
    """
    found = CompactedListing(stream, owner)
    for prefix, into in (
        (keys.live_compacting(stream, owner), found.pending),
        (keys.live_index(stream, owner), found.indexes),
        (keys.live_compacted(stream, owner), found.segments),
    ):
        for _ in range(2):
            for one in bucket.list_objects(prefix):
                name = CompactedName.of(stream, owner, one.key)
                if name is not None:
                    into[name] = one
    return found


def compacted_owners(bucket: Bucket, stream: Stream) -> list[str]:
    """Returns the gateways with compacted segments of a stream, or with indexes or announcements of
    them, by two listings of each. Foreign names are left out."""
    bases = (keys.LIVE_COMPACTING, keys.LIVE_INDEX, keys.LIVE_COMPACTED)
    places = [f"{base}{stream}/" for base in bases]
    found = {one for _ in range(2) for at in places for one in bucket.list_prefixes(at)}
    return sorted(filter(keys.valid_name, found))


def stored_owners(bucket: Bucket, stream: Stream) -> list[str]:
    """Returns the gateways of which anything of a stream is stored; foreign names are left out."""
    found = filter(keys.valid_name, bucket.list_prefixes(f"{keys.LIVE}{stream}/"))
    return sorted({*found, *compacted_owners(bucket, stream)})


def read_compacted(bucket: Bucket, place: CompactedName) -> list[NumberedRow] | None:
    """Reads a compacted segment; None if it is gone. Raises `CorruptError`."""
    data = bucket.get(place.key, limit=MAX_COMPACTED_BYTES)
    return None if data is None else decode_compacted(data, place, run=bucket.url)


def read_index(bucket: Bucket, place: CompactedName) -> CompactedIndex | None:
    """Reads the index of a compacted segment; None if it is gone. Raises `CorruptError`."""
    data = bucket.get(place.index_key, limit=MAX_INDEX_BYTES)
    return None if data is None else decode_index(data, place, run=bucket.url)


def require_compacted(
    bucket: Bucket, place: CompactedName, *, so: str = "nothing was deleted"
) -> list[NumberedRow] | None:
    """Reads a compacted segment as `read_compacted`; None only on evidence that it is gone. Raises
    `UnreadableError`."""
    return require_evidence(bucket, place.key, partial(read_compacted, bucket, place), so=so)


def require_index(
    bucket: Bucket, place: CompactedName, *, so: str = "nothing was deleted"
) -> CompactedIndex | None:
    """Reads an index as `require_compacted` reads a segment."""
    return require_evidence(bucket, place.index_key, partial(read_index, bucket, place), so=so)


def newer_than(
    bucket: Bucket, stream: Stream, owner: str, number: int | None
) -> Iterator[CompactedName]:
    """Yields the compacted segments of an owner that hold rows of segments after ``number`` (None:
    all), by two listings, the oldest first."""
    prefix = keys.live_compacted(stream, owner)
    # A name begins with its last number, and "~" sorts after all that may follow it.
    after = None if number is None else f"{prefix}{number:010d}~"
    listed = sorted({key for _ in range(2) for key in bucket.list(prefix, after=after)})
    found = [name for key in listed if (name := CompactedName.of(stream, owner, key)) is not None]
    yield from sorted(found, key=lambda one: (one.span, one.name))
