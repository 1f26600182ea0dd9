"""Compacted segments: the rows of many segments of one stream in one object, and its index.

Segments of captures and feedback, and lineages, are small and many. A compacted segment,
``live/compacted/<stream>/<owner>/<last>-<first>-<nonce>``, holds the rows of the segments from
``first`` to ``last`` of a gateway, or the lineages of those groups of a learner. Its index,
``live/index/…`` with the same name, says whose rows those are and from when. ``live/compacting/…``
announces the two while they are stored, and holds nothing. All are created once and never replaced:
first the announcement, then the index, then the segment.

A compacted segment ends in the BLAKE3 of its other bytes, and the index is sealed, so one sound
read of either is enough. Without rows they are void.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire import keys
from deltawire.wire.objects import FORMAT, decode_packed, encode_packed
from deltawire.wire.payload import Index
from deltawire.wire.receipts import Pseudonym
from deltawire.wire.seal import seal, unseal

MAX_COMPACTED_BYTES = 512 << 20
MAX_COMPACTED_ROWS = 1 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_INDEX_USERS = 1 << 20

Stream = Literal["captures", "feedback", "lineage"]
_HASH_BYTES = 32
_Name = Annotated[str, Meta(max_length=64)]


class NumberedRow(NamedTuple):
    """The encoded row of a segment, and the segment's number; or a lineage, and its group's."""

    number: int
    data: bytes


class CompactedName(NamedTuple):
    """Where a compacted segment is: its stream, the gateway or learner, and its name."""

    stream: Stream
    owner: str
    name: str

    @classmethod
    def of(cls, stream: Stream, owner: str, key: str) -> CompactedName | None:
        """Returns the place of the object at a listed key; None for a foreign object."""
        name = key.rsplit("/", 1)[-1]
        return None if keys.live_compacted_span(name) is None else cls(stream, owner, name)

    @property
    def span(self) -> tuple[int, int]:
        """The numbers of the first and the last segment."""
        found = keys.live_compacted_span(self.name)
        assert found is not None, self.name
        return found

    @property
    def key(self) -> str:
        """The key of the compacted segment."""
        return keys.live_compacted(*self)

    @property
    def index_key(self) -> str:
        """The key of its index."""
        return keys.live_index(*self)

    @property
    def announcement_key(self) -> str:
        """The key of the object that announces both."""
        return keys.live_compacting(*self)


class CompactedIndex(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/index/<stream>/<owner>/<name>``: whose ``rows`` the segment of this
    name holds, in order of the pseudonyms, and the times of the oldest and the newest one."""

    stream: Stream
    owner: _Name
    name: _Name
    rows: Index
    oldest: float
    newest: float
    users: Annotated[list[Pseudonym], Meta(max_length=MAX_INDEX_USERS)] = []


class _CompactedRows(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    stream: Stream
    owner: _Name
    name: _Name
    rows: Annotated[list[tuple[Index, bytes]], Meta(max_length=MAX_COMPACTED_ROWS)]


def encode_compacted(place: CompactedName, rows: Sequence[NumberedRow]) -> bytes:
    """Encodes the compacted segment at ``place``; without rows it is void, and holds its name."""
    stream, owner, name = place
    body = encode_packed(
        _CompactedRows(
            stream=stream, owner=owner, name=name, rows=[(row.number, row.data) for row in rows]
        )
    )
    return body + blake3(body).digest()


def decode_compacted(data: bytes, place: CompactedName, *, run: str) -> list[NumberedRow]:
    """Decodes a compacted segment; raises `CorruptError` if a bit of it differs, or if it is that
    of another place."""
    body, check = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
    if blake3(body).digest() != check:
        raise CorruptError("a compacted segment is damaged", run=run, key=place.key)
    found = decode_packed(body, _CompactedRows, run=run, key=place.key)
    if (found.format, found.stream, found.owner, found.name) != (FORMAT, *place):
        raise CorruptError("a compacted segment of another place", run=run, key=place.key)
    return [NumberedRow(*row) for row in found.rows]


def encode_index(index: CompactedIndex) -> bytes:
    """Encodes and seals an index."""
    return seal(index, key=keys.live_index(index.stream, index.owner, index.name))


def decode_index(data: bytes, place: CompactedName, *, run: str) -> CompactedIndex:
    """Decodes an index; raises `CorruptError` as `decode_compacted`."""
    found = unseal(data, CompactedIndex, run=run, key=place.index_key, what="index")
    if (found.stream, found.owner, found.name) != place:
        raise CorruptError("the index of another place", run=run, key=place.index_key)
    return found
