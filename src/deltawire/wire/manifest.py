"""Manifests: the small objects whose creation commits a version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire.objects import FORMAT, decode_json
from deltawire.wire.run import Hash, Size, TensorSpec

MAX_MANIFEST_BYTES = 64 << 20
MAX_BLOB_BYTES = 1 << 36

Index = Annotated[int, Meta(ge=0, le=1 << 48)]


class BlobRef(msgspec.Struct, frozen=True):
    """A blob by the BLAKE3 of its content."""

    hash: Hash
    bytes: Size


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A flat range of one tensor: elements ``start … start+count`` of tensor number ``tensor``,
    coded in bytes ``offset … offset+length`` of blob number ``blob``."""

    tensor: Index
    start: Index
    count: Index
    blob: Index
    offset: Index
    length: Index


class Payload(msgspec.Struct, frozen=True):
    """One way to obtain a version: its pieces, and the blobs they lie in."""

    blobs: Annotated[list[BlobRef], Meta(max_length=1 << 16)]
    pieces: Annotated[list[Piece], Meta(max_length=1 << 22)]
    changed: Index

    @property
    def bytes(self) -> int:
        """What fetching it whole costs."""
        return sum(blob.bytes for blob in self.blobs)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version: how to get there from its base, whole, or both.

    ``digest`` is that of the whole model at this version. ``epoch`` counts the writers that a run
    has had, ``nonce`` tells two of them apart. ``annex`` belongs to the application: the trainer
    keeps there which groups the version consumed, so that one create commits both.
    """

    format: int = FORMAT
    version: Index
    base: Index | None = None
    delta: Payload | None = None
    anchor: Payload | None = None
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    epoch: Index
    nonce: Annotated[str, Meta(max_length=64)]
    created_at: float
    annex: dict[str, Any] = {}


def decode_manifest(
    data: bytes, *, version: int, tensors: Sequence[TensorSpec], run: str, key: str
) -> Manifest:
    """Parse a manifest and check it against the run's tensor table.

    Every piece must lie inside its tensor and its blob, an anchor must cover every tensor exactly,
    and pieces of one payload may not overlap. Raises `CorruptError`.
    """
    manifest = decode_json(data, Manifest, run=run, key=key)
    fault = _fault(manifest, version, tensors)
    if fault:
        raise CorruptError(f"manifest: {fault}", run=run, version=version, key=key)
    return manifest


def _fault(manifest: Manifest, version: int, tensors: Sequence[TensorSpec]) -> str:
    if manifest.format != FORMAT:
        return f"format {manifest.format}; this deltawire reads format {FORMAT}"
    if manifest.version != version:
        return f"it says version {manifest.version}"
    if manifest.delta is None and manifest.anchor is None:
        return "neither a delta nor an anchor"
    if manifest.delta is not None and (manifest.base is None or manifest.base >= version):
        return "a delta without an earlier base"
    for payload, whole in ((manifest.delta, False), (manifest.anchor, True)):
        if payload is not None and (fault := _payload_fault(payload, tensors, whole=whole)):
            return fault
    return ""


def _payload_fault(payload: Payload, tensors: Sequence[TensorSpec], *, whole: bool) -> str:
    ends = dict.fromkeys(range(len(tensors)), 0)
    for blob in payload.blobs:
        if blob.bytes > MAX_BLOB_BYTES:
            return f"a blob of {blob.bytes} bytes"
    for piece in sorted(payload.pieces, key=lambda piece: (piece.tensor, piece.start)):
        if piece.tensor >= len(tensors):
            return f"a piece of tensor number {piece.tensor} of {len(tensors)}"
        if piece.blob >= len(payload.blobs):
            return f"a piece in blob number {piece.blob} of {len(payload.blobs)}"
        if piece.offset + piece.length > payload.blobs[piece.blob].bytes:
            return "a piece ends behind its blob"
        if piece.start + piece.count > tensors[piece.tensor].count:
            return f"a piece ends behind tensor {tensors[piece.tensor].name}"
        if piece.start < ends[piece.tensor] or (whole and piece.start != ends[piece.tensor]):
            return f"pieces of tensor {tensors[piece.tensor].name} overlap or leave a gap"
        ends[piece.tensor] = piece.start + piece.count
    if whole and any(ends[i] != tensor.count for i, tensor in enumerate(tensors)):
        return "an anchor that does not cover the model"
    return ""
