"""Defines payloads: the pieces that lead to a version, and the facts that a manifest states about
them.

A manifest does not list its pieces, which take megabytes for a large model. It holds a
`PayloadRef`: with the piece table inside it for a small model, otherwise with the hash of the
table's blob. `deltawire.wire.piece_table` encodes and decodes the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from deltawire.wire.run import Hash, Run, Size

CODEC: Final = "dw1"
"""The codec of payloads that begin with the magics ``DWD1``, ``DWD2`` and ``DWA1``."""

FORK_CODEC: Final = "dw1-fork"
"""The same codec in a fork, where the blobs, and the piece table too, may be those of the run above
(see `deltawire.store.forked`). The name tells releases that do not look there who can."""
FORK_CODEC_SINCE: Final = "0.2"

MAX_BLOB_BYTES = 1 << 36
MAX_BLOBS = 1 << 18
MAX_PIECES = 1 << 20
MAX_TABLE_BYTES = 1 << 26
INLINE_BYTES = 12 << 10
"""The most bytes of a table that is written into the manifest itself."""

ZERO_SUM = "0" * 32

Index = Annotated[int, Meta(ge=0, le=1 << 48)]
Inline = Annotated[bytes, Meta(max_length=INLINE_BYTES)]
Sum = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]

_LANE = 1 << 64


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
    """One way to obtain a version: its pieces, and the blobs that hold them. For a partial reader,
    those of its part.
    """

    blobs: Sequence[BlobRef]
    pieces: Sequence[Piece]

    @property
    def bytes(self) -> int:
        """Returns how many bytes a reader of the whole fetches."""
        return sum(blob.bytes for blob in self.blobs)


class TableRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The location of a payload's piece table: ``inline``, or the blob with hash ``blob`` and
    ``bytes`` bytes, whose head has the half hash ``head``.
    """

    pieces: Annotated[int, Meta(ge=0, le=MAX_PIECES)]
    blobs: Annotated[int, Meta(ge=0, le=MAX_BLOBS)]
    inline: Inline = b""
    blob: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    bytes: Annotated[int, Meta(ge=0, le=MAX_TABLE_BYTES)] = 0
    head: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A payload as a manifest states it. ``bytes`` is the size of all its blobs together.

    ``codec`` names the coding of its pieces. A later release may write another; ``codec_since``
    then names the first release that reads it, for the error messages of earlier ones.
    """

    bytes: Size
    table: TableRef
    codec: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,16}\Z")] = CODEC
    codec_since: Annotated[str, Meta(pattern=r"^[0-9.]{0,16}\Z")] = ""

    @property
    def table_blob(self) -> BlobRef | None:
        """The blob of the piece table, None if it is inline."""
        return BlobRef(self.table.blob, self.table.bytes) if self.table.blob else None


def ref_fault(ref: PayloadRef) -> str:
    """Explains in a few words why this release cannot read a payload that a manifest states; empty
    if it can.
    """
    table = ref.table
    if table.inline and (table.blob or table.bytes or table.head):
        return "a piece table that is both inline and in a blob"
    if not table.inline and not (table.blob and table.bytes and table.head):
        return "a piece table without its bytes, or without the hash of its head"
    if ref.codec == FORK_CODEC and table.inline:
        return "a piece table that is inline, although it is that of the run above"
    if ref.codec in (CODEC, FORK_CODEC):
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
    """Adds digests, or differences of digests: two lanes of 64 bits that wrap around."""
    lane0 = lane1 = 0
    for value in sums:
        lane0 += int(value[:16], 16)
        lane1 += int(value[16:], 16)
    return f"{lane0 % _LANE:016x}{lane1 % _LANE:016x}"
