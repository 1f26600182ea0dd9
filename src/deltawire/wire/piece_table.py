"""The binary table that lists a payload's pieces, in hashed segments.

A reader of some tensors fetches the head, the pages of the index that cover its tensors, the
segments with its pieces, and the segments with their blobs::

    head       "DWT1", pieces, blobs, an entry for each page, a hash for each segment of blobs
    index      pages of `PAGE_SEGMENTS` entries, one for each segment of pieces
    pieces     segments of `SEGMENT_PIECES` records, ascending by tensor and element
    blobs      segments of `SEGMENT_BLOBS` hashes and sizes

An entry has the place of the first piece that it covers, a length, and a hash. Two levels of them
let segments be short, so that a reader of a part of every layer reads few pieces that it does not
need, while the head of 2^18 pieces stays near 20 KB. `docs/FORMAT.md` has the bytes in tables.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from deltawire.errors import CorruptError
from deltawire.wire.payload import (
    FORK_CODEC,
    FORK_CODEC_SINCE,
    INLINE_BYTES,
    BlobRef,
    Payload,
    PayloadRef,
    Piece,
    TableRef,
)
from deltawire.wire.run import Run

SEGMENT_PIECES = 32
PAGE_SEGMENTS = 16
SEGMENT_BLOBS = 8

_MAGIC = b"DWT1"
_HEAD = struct.Struct("<4sII")
_ENTRY = struct.Struct("<IQI16s")
_BLOB = struct.Struct("<32sQ")
_HASH_BYTES = 16
_PLACE, _COUNT, _BLOB_NUMBER, _OFFSET = 1, 2, 4, 8
_FLAG_BITS = 4
_VARINT_BYTES = 8

Place = tuple[int, int]
"""The number of a tensor, and one of its elements."""


class Segment(NamedTuple):
    """A range of a table that has its own hash: ``length`` bytes at ``offset`` with ``records``
    records. Records of pieces begin at the place ``first`` and end before the place ``after``
    (None: at the table's end).
    """

    offset: int
    length: int
    hash: bytes
    records: int
    first: Place = (0, 0)
    after: Place | None = None


class Page(NamedTuple):
    """A page of the index: a `Segment` of entries. The segments that these describe hold
    ``pieces`` pieces and take the ``body_length`` bytes at ``body``."""

    offset: int
    length: int
    hash: bytes
    records: int
    first: Place
    after: Place | None
    pieces: int
    body: int
    body_length: int


class Head(NamedTuple):
    """A decoded table head: the pages of the index, and the segments of blobs."""

    blobs: int
    pages: list[Page]
    blob_segments: list[Segment]

    @property
    def end(self) -> int:
        """The length of the whole table."""
        page = self.pages[-1] if self.pages else None
        last = self.blob_segments[-1] if self.blob_segments else None
        if last is not None:
            return last.offset + last.length
        return page.body + page.body_length if page else _HEAD.size


_Covering = TypeVar("_Covering", Page, Segment)


def wanted(covering: Sequence[_Covering], ranges: Mapping[int, tuple[int, int]]) -> list[_Covering]:
    """Returns the pages or segments, given in ascending order, that may have pieces of ``ranges``.

    ``ranges`` maps tensor numbers to the first element and the one after the last, at chunk
    boundaries.
    """
    places = sorted((tensor, start, end) for tensor, (start, end) in ranges.items())
    found, at = [], 0
    for each in covering:
        while at < len(places) and (places[at][0], places[at][2]) <= each.first:
            at += 1
        if at == len(places):
            break
        if each.after is None or places[at][:2] < each.after:
            found.append(each)
    return found


def encode_table(payload: Payload, table: Run) -> bytes:
    """Encodes the piece table of a payload whose pieces ascend (see `payload_fault`)."""
    firsts = payload.pieces[::SEGMENT_PIECES]
    counts = [tensor.count for tensor in table.tensors]
    segments = [
        _encode_pieces(pieces, table.chunk, counts)
        for pieces in _groups(payload.pieces, SEGMENT_PIECES)
    ]
    entries = [
        _ENTRY.pack(first.tensor, first.start, len(data), _half(data))
        for data, first in zip(segments, firsts, strict=True)
    ]
    pages = [b"".join(group) for group in _groups(entries, PAGE_SEGMENTS)]
    lengths = [sum(map(len, group)) for group in _groups(segments, PAGE_SEGMENTS)]
    head = [_HEAD.pack(_MAGIC, len(payload.pieces), len(payload.blobs))]
    for first, length, page in zip(firsts[::PAGE_SEGMENTS], lengths, pages, strict=True):
        head.append(_ENTRY.pack(first.tensor, first.start, length, _half(page)))
    blobs = [_BLOB.pack(bytes.fromhex(ref.hash), ref.bytes) for ref in payload.blobs]
    blob_segments = [b"".join(group) for group in _groups(blobs, SEGMENT_BLOBS)]
    head += map(_half, blob_segments)
    return b"".join([*head, *pages, *segments, *blob_segments])


def head_bytes(ref: PayloadRef) -> int:
    """Returns the length of the head of a payload's table."""
    pages = _ceil(ref.table.pieces, SEGMENT_PIECES * PAGE_SEGMENTS)
    return _HEAD.size + pages * _ENTRY.size + _ceil(ref.table.blobs, SEGMENT_BLOBS) * _HASH_BYTES


def payload_ref(payload: Payload, encoded: bytes) -> PayloadRef:
    """Returns the manifest's reference to a payload whose piece table is ``encoded``; a table that
    is not inline must be put as a blob before the manifest is created."""
    counts = TableRef(pieces=len(payload.pieces), blobs=len(payload.blobs), inline=encoded)
    ref = PayloadRef(bytes=payload.bytes, table=counts)
    return ref if len(encoded) <= INLINE_BYTES else _in_blob(ref)


def table_above(ref: PayloadRef) -> PayloadRef:
    """Returns the reference of a fork to a payload of the run above, whose piece table it does not
    repeat: it names the table by its hash only."""
    named = _in_blob(ref) if ref.table.inline else ref
    return msgspec.structs.replace(named, codec=FORK_CODEC, codec_since=FORK_CODEC_SINCE)


def _in_blob(ref: PayloadRef) -> PayloadRef:
    """Returns a reference that names the table in place of holding it."""
    encoded = ref.table.inline
    table = msgspec.structs.replace(
        ref.table,
        inline=b"",
        blob=blake3(encoded).hexdigest(),
        bytes=len(encoded),
        head=_half(encoded[: head_bytes(ref)]).hex(),
    )
    return msgspec.structs.replace(ref, table=table)


def decode_table(data: bytes, ref: PayloadRef, table: Run) -> Payload:
    """Decodes a whole piece table; raises `CorruptError`."""
    head = decode_head(data[: head_bytes(ref)], ref)
    pieces: list[Piece] = []
    for page in head.pages:
        for segment in decode_page(page, _part(data, page)):
            pieces += decode_pieces(segment, _part(data, segment), table)
    blobs: list[BlobRef] = []
    for segment in head.blob_segments:
        blobs += decode_blobs(segment, _part(data, segment))
    if len(data) != head.end:
        raise CorruptError("a piece table is longer than its segments")
    if sum(blob.bytes for blob in blobs) != ref.bytes:
        raise CorruptError(
            "the sizes of the payload's blobs do not add up to the size that it states"
        )
    return Payload(blobs, pieces)


def decode_head(data: bytes | memoryview, ref: PayloadRef) -> Head:
    """Reads a table's head; raises `CorruptError`."""
    if len(data) != head_bytes(ref):
        raise CorruptError("a piece table ends within its head")
    magic, pieces, blobs = _HEAD.unpack_from(data)
    if magic != _MAGIC or (pieces, blobs) != (ref.table.pieces, ref.table.blobs):
        raise CorruptError("the piece table is not that of this payload")
    if not ref.table.inline and _half(data).hex() != ref.table.head:
        raise CorruptError("the head of a piece table does not match its hash")
    segments = _ceil(pieces, SEGMENT_PIECES)
    entries = _entries(data[_HEAD.size :], _ceil(segments, PAGE_SEGMENTS), None)
    offset = len(data)
    body = offset + segments * _ENTRY.size
    pages = []
    for number, (first, after, length, found) in enumerate(entries):
        count = min(PAGE_SEGMENTS, segments - number * PAGE_SEGMENTS)
        held = min(PAGE_SEGMENTS * SEGMENT_PIECES, pieces - number * PAGE_SEGMENTS * SEGMENT_PIECES)
        size = count * _ENTRY.size
        pages.append(Page(offset, size, found, count, first, after, held, body, length))
        offset, body = offset + size, body + length
    hashes = bytes(data[_HEAD.size + len(pages) * _ENTRY.size :])
    blob_segments = []
    for at in range(0, len(hashes), _HASH_BYTES):
        count = min(SEGMENT_BLOBS, blobs - at // _HASH_BYTES * SEGMENT_BLOBS)
        size = count * _BLOB.size
        blob_segments.append(Segment(body, size, hashes[at : at + _HASH_BYTES], count))
        body += size
    return Head(blobs, pages, blob_segments)


def decode_page(page: Page, data: bytes | memoryview) -> list[Segment]:
    """Decodes the segments that a page of the index describes; raises `CorruptError`."""
    _check_hash(page, data)
    segments, offset, left = [], page.body, page.pieces
    for first, after, length, found in _entries(data, page.records, page.after):
        segments.append(Segment(offset, length, found, min(SEGMENT_PIECES, left), first, after))
        offset, left = offset + length, left - SEGMENT_PIECES
    if segments[0].first != page.first or offset != page.body + page.body_length:
        raise CorruptError("a page of a piece table does not match its entry")
    return segments


def decode_blobs(segment: Segment, data: bytes | memoryview) -> list[BlobRef]:
    """Decodes the blobs of one segment; raises `CorruptError`."""
    _check_hash(segment, data)
    return [BlobRef(found.hex(), size) for found, size in _BLOB.iter_unpack(data)]


def decode_pieces(segment: Segment, data: bytes | memoryview, table: Run) -> list[Piece]:
    """Decodes the pieces of one segment; raises `CorruptError`."""
    _check_hash(segment, data)
    try:
        pieces, at = _decode_pieces(bytes(data), segment, table)
    except IndexError:
        raise CorruptError("a segment of a piece table that its pieces do not fill") from None
    if at != len(data):
        raise CorruptError("a segment of a piece table that its pieces do not fill")
    return pieces


def _decode_pieces(data: bytes, segment: Segment, table: Run) -> tuple[list[Piece], int]:
    tensors, at = table.tensors, 0
    pieces: list[Piece] = []
    (tensor, end), blob, offset = segment.first, 0, 0
    for _ in range(segment.records):
        flags, at = _varint(data, at)
        size = flags >> _FLAG_BITS
        if flags & _PLACE:
            if not pieces:
                raise CorruptError("the first piece of a segment states its place twice")
            gap, at = _varint(data, at)
            place, at = _varint(data, at)
            tensor, start = tensor + gap, place if gap else end + place
        else:
            if pieces and end == tensors[tensor].count:
                after = _following(tensor, len(tensors), lambda number: tensors[number].count)
                if after is None:
                    raise IndexError
                tensor, end = after, 0
            start = end
        if flags & _COUNT:
            length, at = _varint(data, at)
        else:
            length = min(table.chunk - start % table.chunk, tensors[tensor].count - start)
        end = start + length
        if flags & _BLOB_NUMBER:
            blob, at = _varint(data, at)
            offset = 0
        if flags & _OFFSET:
            offset, at = _varint(data, at)
        if at + 2 * _HASH_BYTES > len(data):
            raise IndexError
        total, found = data[at : at + 16].hex(), data[at + 16 : at + 32].hex()
        pieces.append(Piece(tensor, start, length, blob, offset, size, total, found))
        at, offset = at + 32, offset + size
    return pieces, at


def _encode_pieces(pieces: Sequence[Piece], chunk: int, counts: Sequence[int]) -> bytes:
    out = bytearray()
    tensor, end = pieces[0].tensor, pieces[0].start
    blob, offset = -1, 0
    for number, piece in enumerate(pieces):
        if number and end == counts[tensor]:
            expected = (_following(tensor, len(counts), counts.__getitem__), 0)
        else:
            expected = (tensor, end)
        rest = min(chunk - piece.start % chunk, counts[piece.tensor] - piece.start)
        begins = 0 if piece.blob != blob else offset
        flags = _PLACE if (piece.tensor, piece.start) != expected else 0
        flags |= _COUNT if piece.count != rest else 0
        flags |= _BLOB_NUMBER if piece.blob != blob else 0
        flags |= _OFFSET if piece.offset != begins else 0
        out += _packed(piece.length << _FLAG_BITS | flags)
        if flags & _PLACE:
            gap = piece.tensor - tensor
            out += _packed(gap) + _packed(piece.start if gap else piece.start - end)
        if flags & _COUNT:
            out += _packed(piece.count)
        if flags & _BLOB_NUMBER:
            out += _packed(piece.blob)
        if flags & _OFFSET:
            out += _packed(piece.offset)
        out += bytes.fromhex(piece.sum) + bytes.fromhex(piece.hash)
        tensor, end = piece.tensor, piece.end
        blob, offset = piece.blob, piece.offset + piece.length
    return bytes(out)


def _following(tensor: int, tensors: int, count: Callable[[int], int]) -> int | None:
    """Returns the next of so many ``tensors`` that has elements; ``count`` gives their number."""
    for number in range(tensor + 1, tensors):
        if count(number):
            return number
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    for place in range(at + 1, at + _VARINT_BYTES):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise IndexError


def _packed(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _entries(
    data: bytes | memoryview, count: int, after: Place | None
) -> list[tuple[Place, Place | None, int, bytes]]:
    """``count`` entries: first place, the place after the last, length, hash."""
    found = [_ENTRY.unpack_from(data, number * _ENTRY.size) for number in range(count)]
    ends = [*((tensor, start) for tensor, start, _, _ in found[1:]), after][:count]
    return [
        ((tensor, start), end, length, hash_)
        for (tensor, start, length, hash_), end in zip(found, ends, strict=True)
    ]


_Item = TypeVar("_Item")


def _groups(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _half(data: bytes | memoryview) -> bytes:
    return blake3(data).digest(_HASH_BYTES)


def _part(data: bytes, segment: Segment | Page) -> memoryview:
    return memoryview(data)[segment.offset : segment.offset + segment.length]


def _check_hash(segment: Segment | Page, data: bytes | memoryview) -> None:
    if len(data) != segment.length or _half(data) != segment.hash:
        raise CorruptError("a segment of a piece table does not match its hash")
