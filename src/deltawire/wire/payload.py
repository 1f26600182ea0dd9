"""Payloads: the pieces that lead to a version, and the binary table that lists them.

A manifest does not list its pieces: those of a large model take megabytes. It holds a `PayloadRef`
with the piece table of a small model inside it, and the hash of the table's blob otherwise. The
table has a head and hashed segments, so that a reader of some tensors fetches the head and the
segments with their pieces, and no more::

    head       "DWT1", pieces, blobs, then for each segment what it begins with and its hash
    pieces     segments of `SEGMENT_PIECES` records, ascending by tensor and element
    blobs      segments of `SEGMENT_BLOBS` hashes and sizes

`docs/FORMAT.md` has the bytes in tables.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire.run import Hash, Run, Size, TensorSpec

CODEC: Final = "dw1"
"""The codec of payloads: that of the magics ``DWD1`` and ``DWA1``."""

MAX_BLOB_BYTES = 1 << 36
MAX_BLOBS = 1 << 18
MAX_PIECES = 1 << 20
MAX_TABLE_BYTES = 1 << 26
SEGMENT_PIECES = 128
SEGMENT_BLOBS = 1024
INLINE_BYTES = 12 << 10
"""The most bytes of a table that is written into the manifest itself."""

ZERO_SUM = "0" * 32

Index = Annotated[int, Meta(ge=0, le=1 << 48)]
Inline = Annotated[bytes, Meta(max_length=INLINE_BYTES)]
Sum = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]

_LANE = 1 << 64
_MAGIC = b"DWT1"
_HEAD = struct.Struct("<4sII")
_PIECE_ENTRY = struct.Struct("<IQI16s")
_BLOB = struct.Struct("<32sQ")
_HASH_BYTES = 16
_PLACE, _COUNT, _BLOB_NUMBER, _OFFSET = 1, 2, 4, 8
_VARINT_BYTES = 8


class BlobRef(msgspec.Struct, frozen=True):
    """A blob by the BLAKE3 of its content."""

    hash: Hash
    bytes: Size


class Piece(msgspec.Struct, frozen=True):
    """A flat range of one tensor: elements ``start`` to ``start + count`` of tensor number
    ``tensor``, coded in bytes ``offset`` to ``offset + length`` of blob number ``blob``.

    ``sum`` is what the piece adds to the model's digest, in the digest's own form: in an anchor
    the digest of its elements, in a delta that of the target's less that of the base's. ``hash``
    is the first half of the BLAKE3 of its bytes, for readers that fetch no more than those.
    """

    tensor: int
    start: int
    count: int
    blob: int
    offset: int
    length: int
    sum: str
    hash: str

    @property
    def end(self) -> int:
        """The element after its last."""
        return self.start + self.count


class Payload(msgspec.Struct, frozen=True):
    """One way to obtain a version: its pieces, and the blobs they lie in. Of a reader of a part,
    those of the part."""

    blobs: Sequence[BlobRef]
    pieces: Sequence[Piece]

    @property
    def bytes(self) -> int:
        """Returns how many bytes a reader of the whole fetches."""
        return sum(blob.bytes for blob in self.blobs)


class TableRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a payload's piece table is: ``inline``, or the blob of hash ``blob``, of ``bytes``
    bytes, whose head has the half hash ``head``."""

    pieces: Annotated[int, Meta(ge=0, le=MAX_PIECES)]
    blobs: Annotated[int, Meta(ge=0, le=MAX_BLOBS)]
    inline: Inline = b""
    blob: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    bytes: Annotated[int, Meta(ge=0, le=MAX_TABLE_BYTES)] = 0
    head: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A payload as a manifest states it. ``bytes`` is the size of all its blobs together.

    ``codec`` names the coding of its pieces. A later release may write another; ``codec_since``
    then says which release reads it, for the error message of those that cannot.
    """

    bytes: Size
    table: TableRef
    codec: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,16}\Z")] = CODEC
    codec_since: Annotated[str, Meta(pattern=r"^[0-9.]{0,16}\Z")] = ""

    @property
    def table_blob(self) -> BlobRef | None:
        """The blob of the piece table, None if it is inline."""
        return BlobRef(self.table.blob, self.table.bytes) if self.table.blob else None

    @property
    def head_bytes(self) -> int:
        """The length of the table's head."""
        segments = _segments(self.table.pieces, SEGMENT_PIECES)
        blob_segments = _segments(self.table.blobs, SEGMENT_BLOBS)
        return _HEAD.size + segments * _PIECE_ENTRY.size + blob_segments * _HASH_BYTES


class Segment(NamedTuple):
    """A segment of a table: ``offset`` and ``length`` in the table, its half hash, and, of a
    segment of pieces, the tensor and the element that its first piece begins with."""

    offset: int
    length: int
    hash: bytes
    tensor: int = 0
    start: int = 0


class Head(NamedTuple):
    """The head of a table, read: its segments of pieces and of blobs."""

    pieces: int
    blobs: int
    piece_segments: list[Segment]
    blob_segments: list[Segment]

    def wanted(self, ranges: Mapping[int, tuple[int, int]]) -> list[int]:
        """Returns the numbers of the segments that may have pieces of ``ranges``, which map tensor
        numbers to the first element and the one after the last, at chunk boundaries."""
        places = sorted((tensor, *span) for tensor, span in ranges.items())
        found, at = [], 0
        firsts = [(segment.tensor, segment.start) for segment in self.piece_segments]
        for number, first in enumerate(firsts):
            following = firsts[number + 1] if number + 1 < len(firsts) else None
            while at < len(places) and (places[at][0], places[at][2]) <= first:
                at += 1
            if at == len(places):
                break
            if following is None or places[at][:2] < following:
                found.append(number)
        return found


def encode_table(payload: Payload, table: Run) -> bytes:
    """Encodes the piece table of a payload whose pieces ascend (see `payload_fault`)."""
    segments = [
        _encode_pieces(payload.pieces[at : at + SEGMENT_PIECES], table)
        for at in range(0, len(payload.pieces), SEGMENT_PIECES)
    ]
    entries = [
        _PIECE_ENTRY.pack(first.tensor, first.start, len(data), _half(data))
        for data, first in zip(segments, payload.pieces[::SEGMENT_PIECES], strict=True)
    ]
    blobs = [_BLOB.pack(bytes.fromhex(ref.hash), ref.bytes) for ref in payload.blobs]
    blob_segments = [
        b"".join(blobs[at : at + SEGMENT_BLOBS]) for at in range(0, len(blobs), SEGMENT_BLOBS)
    ]
    head = _HEAD.pack(_MAGIC, len(payload.pieces), len(blobs)) + b"".join(entries)
    head += b"".join(_half(data) for data in blob_segments)
    return b"".join([head, *segments, *blob_segments])


def payload_ref(payload: Payload, encoded: bytes) -> PayloadRef:
    """Returns the manifest's reference to a payload whose piece table is ``encoded``; a table that
    is not inline must be put as a blob before the manifest is created."""
    counts = TableRef(pieces=len(payload.pieces), blobs=len(payload.blobs))
    if len(encoded) <= INLINE_BYTES:
        table = msgspec.structs.replace(counts, inline=encoded)
        return PayloadRef(bytes=payload.bytes, table=table)
    ref = PayloadRef(bytes=payload.bytes, table=counts)
    table = msgspec.structs.replace(
        counts,
        blob=blake3(encoded).hexdigest(),
        bytes=len(encoded),
        head=_half(encoded[: ref.head_bytes]).hex(),
    )
    return msgspec.structs.replace(ref, table=table)


def decode_table(data: bytes, ref: PayloadRef, table: Run) -> Payload:
    """Decodes a whole piece table; raises `CorruptError`."""
    head = decode_head(data[: ref.head_bytes], ref)
    pieces: list[Piece] = []
    for segment in head.piece_segments:
        pieces += decode_pieces(head, segment, _part(data, segment), table)
    blobs: list[BlobRef] = []
    for segment in head.blob_segments:
        blobs += decode_blobs(segment, _part(data, segment))
    last = [*head.piece_segments, *head.blob_segments][-1:]
    if len(data) != (last[0].offset + last[0].length if last else ref.head_bytes):
        raise CorruptError("a piece table with more in it than its segments")
    if sum(blob.bytes for blob in blobs) != ref.bytes:
        raise CorruptError("the payload's blobs are not of as many bytes as it says")
    return Payload(blobs, pieces)


def decode_head(data: bytes | memoryview, ref: PayloadRef) -> Head:
    """Read a table's head; raises `CorruptError`."""
    if len(data) != ref.head_bytes:
        raise CorruptError("a piece table that ends within its head")
    magic, pieces, blobs = _HEAD.unpack_from(data)
    if magic != _MAGIC or (pieces, blobs) != (ref.table.pieces, ref.table.blobs):
        raise CorruptError("not the piece table of this payload")
    if not ref.table.inline and _half(data).hex() != ref.table.head:
        raise CorruptError("the head of a piece table does not match its hash")
    at, offset = _HEAD.size, ref.head_bytes
    piece_segments, blob_segments = [], []
    for _ in range(_segments(pieces, SEGMENT_PIECES)):
        tensor, start, length, found = _PIECE_ENTRY.unpack_from(data, at)
        piece_segments.append(Segment(offset, length, found, tensor, start))
        at, offset = at + _PIECE_ENTRY.size, offset + length
    for number in range(_segments(blobs, SEGMENT_BLOBS)):
        length = _BLOB.size * min(SEGMENT_BLOBS, blobs - number * SEGMENT_BLOBS)
        blob_segments.append(Segment(offset, length, bytes(data[at : at + _HASH_BYTES])))
        at, offset = at + _HASH_BYTES, offset + length
    return Head(pieces, blobs, piece_segments, blob_segments)


def decode_blobs(segment: Segment, data: bytes | memoryview) -> list[BlobRef]:
    """Decodes the blobs of one segment; raises `CorruptError`."""
    _check_segment(segment, data)
    return [BlobRef(found.hex(), size) for found, size in _BLOB.iter_unpack(data)]


def decode_pieces(
    head: Head, segment: Segment, data: bytes | memoryview, table: Run
) -> list[Piece]:
    """Decodes the pieces of one segment; raises `CorruptError`."""
    _check_segment(segment, data)
    whole = len(head.piece_segments) * SEGMENT_PIECES
    last = segment is head.piece_segments[-1]
    count = SEGMENT_PIECES - (whole - head.pieces if last else 0)
    try:
        pieces, at = _decode_pieces(bytes(data), count, segment, table)
    except IndexError:
        raise CorruptError("a segment of a piece table that its pieces do not fill") from None
    if at != len(data):
        raise CorruptError("a segment of a piece table that its pieces do not fill")
    return pieces


def _decode_pieces(
    data: bytes, count: int, segment: Segment, table: Run
) -> tuple[list[Piece], int]:
    tensors, at = table.tensors, 0
    pieces: list[Piece] = []
    tensor, end, blob, offset = segment.tensor, segment.start, 0, 0
    for _ in range(count):
        flags, at = data[at], at + 1
        if flags & _PLACE:
            gap, at = _varint(data, at)
            place, at = _varint(data, at)
            tensor, start = tensor + gap, place if gap else end + place
        else:
            if pieces and end == tensors[tensor].count:
                tensor, end = _following(tensors, tensor), 0
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
        size, at = _varint(data, at)
        if flags > 15 or at + 2 * _HASH_BYTES > len(data):
            raise IndexError
        total, found = data[at : at + 16].hex(), data[at + 16 : at + 32].hex()
        pieces.append(Piece(tensor, start, length, blob, offset, size, total, found))
        at, offset = at + 32, offset + size
    return pieces, at


def _encode_pieces(pieces: Sequence[Piece], table: Run) -> bytes:
    tensors, out = table.tensors, bytearray()
    tensor, end = pieces[0].tensor, pieces[0].start
    blob, offset = -1, 0
    for number, piece in enumerate(pieces):
        if number and end == tensors[tensor].count:
            expected = (_following(tensors, tensor, default=-1), 0)
        else:
            expected = (tensor, end)
        rest = min(table.chunk - piece.start % table.chunk, tensors[piece.tensor].count)
        rest = min(rest, tensors[piece.tensor].count - piece.start)
        begins = 0 if piece.blob != blob else offset
        flags = _PLACE if (piece.tensor, piece.start) != expected else 0
        flags |= _COUNT if piece.count != rest else 0
        flags |= _BLOB_NUMBER if piece.blob != blob else 0
        flags |= _OFFSET if piece.offset != begins else 0
        out.append(flags)
        if flags & _PLACE:
            gap = piece.tensor - tensor
            out += _packed(gap) + _packed(piece.start if gap else piece.start - end)
        if flags & _COUNT:
            out += _packed(piece.count)
        if flags & _BLOB_NUMBER:
            out += _packed(piece.blob)
        if flags & _OFFSET:
            out += _packed(piece.offset)
        out += _packed(piece.length) + bytes.fromhex(piece.sum) + bytes.fromhex(piece.hash)
        tensor, end = piece.tensor, piece.end
        blob, offset = piece.blob, piece.offset + piece.length
    return bytes(out)


def _following(tensors: Sequence[TensorSpec], tensor: int, default: int | None = None) -> int:
    """The next tensor that has elements."""
    for number in range(tensor + 1, len(tensors)):
        if tensors[number].count:
            return number
    if default is None:
        raise IndexError
    return default


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


def _segments(count: int, size: int) -> int:
    return -(-count // size)


def _half(data: bytes | memoryview) -> bytes:
    return blake3(data).digest(_HASH_BYTES)


def _part(data: bytes, segment: Segment) -> memoryview:
    return memoryview(data)[segment.offset : segment.offset + segment.length]


def _check_segment(segment: Segment, data: bytes | memoryview) -> None:
    if len(data) != segment.length or _half(data) != segment.hash:
        raise CorruptError("a segment of a piece table does not match its hash")


def codec_fault(ref: PayloadRef) -> str:
    """Why this release cannot read a payload, in a few words; empty if it can."""
    if ref.codec == CODEC:
        return ""
    since = f"; deltawire {ref.codec_since} or newer reads it" if ref.codec_since else ""
    return f"the payload is coded by {ref.codec!r}, which this release does not know{since}"


def payload_fault(payload: Payload, table: Run, *, base_digest: str | None, to: str) -> str:
    """Describes in a few words the first fault of a payload that leads from ``base_digest`` (None:
    from nothing) to the digest ``to``; empty if it has none."""
    if fault := too_many(payload) or pieces_fault(payload, table):
        return fault
    if base_digest is None and (fault := _coverage_fault(payload.pieces, table)):
        return fault
    if add_sums([base_digest or ZERO_SUM, *(piece.sum for piece in payload.pieces)]) != to:
        return "the sums of its pieces do not lead to its digest"
    return ""


def too_many(payload: Payload) -> str:
    """Names the readers' limit that a payload exceeds; empty if none."""
    if len(payload.pieces) > MAX_PIECES:
        return f"{len(payload.pieces)} pieces, the most is {MAX_PIECES}"
    if len(payload.blobs) > MAX_BLOBS:
        return f"{len(payload.blobs)} blobs, the most is {MAX_BLOBS}"
    return ""


def pieces_fault(payload: Payload, table: Run) -> str:
    """Describes the first fault in the pieces of a payload or of one part, each piece and their
    order; empty if there is none."""
    tensors, blobs = table.tensors, payload.blobs
    for blob in blobs:
        if blob.bytes > MAX_BLOB_BYTES:
            return f"a blob of {blob.bytes} bytes"
    before = (0, 0)
    for piece in payload.pieces:
        if piece.tensor >= len(tensors):
            return f"a piece of tensor number {piece.tensor} of {len(tensors)}"
        if piece.blob >= len(blobs):
            return f"a piece in blob number {piece.blob} of {len(blobs)}"
        spec = tensors[piece.tensor]
        if piece.count < 1 or piece.length < 1:
            return f"an empty piece of tensor {spec.name}"
        if piece.offset + piece.length > blobs[piece.blob].bytes:
            return "a piece ends after its blob"
        if piece.end > spec.count:
            return f"a piece ends after tensor {spec.name}"
        if piece.start // table.chunk != (piece.end - 1) // table.chunk:
            return f"a piece of tensor {spec.name} crosses from one chunk into another"
        if (piece.tensor, piece.start) < before:
            return f"pieces of tensor {spec.name} overlap or do not ascend"
        before = (piece.tensor, piece.end)
    return ""


def _coverage_fault(pieces: Sequence[Piece], table: Run) -> str:
    held = [0] * len(table.tensors)
    for piece in pieces:
        held[piece.tensor] += piece.count
    for count, spec in zip(held, table.tensors, strict=True):
        if count != spec.count:
            return f"an anchor that does not cover tensor {spec.name}"
    return ""


def add_sums(sums: Iterable[str]) -> str:
    """Digests, or differences of digests, added up: two lanes of 64 bits that wrap around."""
    lane0 = lane1 = 0
    for value in sums:
        lane0 += int(value[:16], 16)
        lane1 += int(value[16:], 16)
    return f"{lane0 % _LANE:016x}{lane1 % _LANE:016x}"
