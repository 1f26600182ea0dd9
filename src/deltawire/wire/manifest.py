"""Manifests, the small objects whose creation commits a version; and folds, the ways around."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire import keys
from deltawire.wire.objects import FORMAT, check_raw, decode_json
from deltawire.wire.run import MAX_MODEL_FILES, Hash, Identity, ModelFile, Run, Size
from deltawire.wire.seal import Signer, check_seal, seal, unseal

MAX_MANIFEST_BYTES = 32 << 20
MAX_METADATA_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 36
MAX_BLOBS = 1 << 16
MAX_PIECES = 1 << 18

ZERO_SUM = "0" * 32

Index = Annotated[int, Meta(ge=0, le=1 << 48)]
Sum = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]

_LANE = 1 << 64


class BlobRef(msgspec.Struct, frozen=True):
    """A blob by the BLAKE3 of its content."""

    hash: Hash
    bytes: Size


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A flat range of one tensor: elements ``start … start+count`` of tensor number ``tensor``,
    coded in bytes ``offset … offset+length`` of blob number ``blob``.

    ``sum`` is what the piece adds to the model's digest, in the digest's own form: in an anchor
    the digest of its elements, in a delta that of the target's less that of the base's. ``hash``
    is the first half of the BLAKE3 of its bytes, for readers that fetch no more than those.
    """

    tensor: Index
    start: Index
    count: Index
    blob: Index
    offset: Index
    length: Index
    sum: Sum
    hash: Sum

    @property
    def end(self) -> int:
        """The element behind its last."""
        return self.start + self.count


class Payload(msgspec.Struct, frozen=True):
    """One way to obtain a version: its pieces, and the blobs they lie in."""

    blobs: Annotated[list[BlobRef], Meta(max_length=MAX_BLOBS)]
    pieces: Annotated[list[Piece], Meta(max_length=MAX_PIECES)]
    changed: Index

    @property
    def bytes(self) -> int:
        """What fetching it whole costs."""
        return sum(blob.bytes for blob in self.blobs)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version: how to get there from its base, whole, or both.

    ``run`` is the run's id. ``digest`` is that of the whole model at this version, ``base_digest``
    that at its base. ``last_anchor`` is the newest version at or before this one that its writer
    knew to be stored whole; it is a hint and nothing depends on it. ``epoch`` counts the writers
    that a run has had, ``nonce`` tells two of them apart. ``metadata`` belongs to the application:
    the trainer keeps there which groups the version consumed, so that one create commits both.
    ``model_files`` are the other files of the version's directory where those are not run.json's.
    A ``pruned`` version is closed: retention has taken its payloads, and left this so that its
    name is never free again.
    """

    format: int = FORMAT
    run: Identity
    version: Index
    base: Index | None = None
    base_digest: Sum = ZERO_SUM
    delta: Payload | None = None
    anchor: Payload | None = None
    digest: Sum
    last_anchor: Index | None = None
    epoch: Index
    nonce: Annotated[str, Meta(max_length=64)]
    created_at: float
    pruned: bool = False
    model_files: Annotated[list[ModelFile], Meta(max_length=MAX_MODEL_FILES)] | None = None
    metadata: dict[str, Any] = {}


class CompactedDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A way to ``version`` that is no commit: from an earlier ``base`` in one stride, or, without
    a base, an anchor that was made later than its version."""

    format: int = FORMAT
    run: Identity
    version: Index
    base: Index | None = None
    base_digest: Sum = ZERO_SUM
    payload: Payload
    digest: Sum
    created_at: float


class _Outline(msgspec.Struct):
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


def encode_manifest(manifest: Manifest, *, signer: Signer | None = None) -> bytes:
    """The object at the manifest's key."""
    return seal(manifest, key=keys.manifest(manifest.version), signer=signer)


def encode_compacted(fold: CompactedDelta, *, signer: Signer | None = None) -> bytes:
    """The object at the fold's key."""
    return seal(fold, key=keys.compacted(fold.base, fold.version), signer=signer)


def too_large(value: Manifest | CompactedDelta, data: bytes) -> str:
    """Which limit of readers ``value``, sealed in ``data``, exceeds, in a few words; empty if none.
    Of what nobody could read, nothing may be committed."""
    payloads = [value.payload] if isinstance(value, CompactedDelta) else [value.delta, value.anchor]
    for payload in payloads:
        if payload is not None and len(payload.pieces) > MAX_PIECES:
            return f"{len(payload.pieces)} pieces, the most is {MAX_PIECES}"
        if payload is not None and len(payload.blobs) > MAX_BLOBS:
            return f"{len(payload.blobs)} blobs, the most is {MAX_BLOBS}"
    if len(data) > MAX_MANIFEST_BYTES:
        return f"{len(data)} bytes, the most is {MAX_MANIFEST_BYTES}"
    return ""


def decode_manifest(data: bytes, *, version: int, table: Run, run: str, key: str) -> Manifest:
    """Parse a manifest and check it against the run's table.

    Every piece must lie inside its tensor, its chunk and its blob, an anchor must cover every
    tensor exactly, pieces of one payload may not overlap, and their sums must lead from the
    base's digest to the version's. Raises `CorruptError`.
    """
    check_seal(data, "manifest", run=run, key=key)
    outline = decode_json(data, _Outline, run=run, key=key, what="manifest")
    check_raw(outline.metadata, MAX_METADATA_BYTES, "metadata", run=run, key=key)
    manifest = decode_json(data, Manifest, run=run, key=key)
    fault = _manifest_fault(manifest, version, table)
    if fault:
        raise CorruptError(f"manifest: {fault}", run=run, version=version, key=key)
    return manifest


def decode_compacted(
    data: bytes, *, base: int | None, version: int, table: Run, run: str, key: str
) -> CompactedDelta:
    """Parse a fold and check it as a manifest is checked; raises `CorruptError`."""
    fold = unseal(data, CompactedDelta, run=run, key=key)
    fault = _identity_fault(fold, version, table)
    if not fault and fold.base != base:
        fault = f"it says base {fold.base}"
    if not fault and base is not None and base >= version:
        fault = "a fold without an earlier base"
    if fault := fault or payload_fault(
        fold.payload, table, base_digest=None if base is None else fold.base_digest, to=fold.digest
    ):
        raise CorruptError(f"fold: {fault}", run=run, version=version, key=key)
    return fold


def _identity_fault(value: Manifest | CompactedDelta, version: int, table: Run) -> str:
    if value.format != FORMAT:
        return f"format {value.format}; this deltawire reads format {FORMAT}"
    if value.run != table.id:
        return "it belongs to another run"
    if value.version != version:
        return f"it says version {value.version}"
    return ""


def _manifest_fault(manifest: Manifest, version: int, table: Run) -> str:
    if fault := _identity_fault(manifest, version, table):
        return fault
    if version == 0 and manifest.digest != table.digest:
        return "its digest is not the one run.json states for version 0"
    if manifest.pruned:
        return "pruned, but with a payload" if manifest.delta or manifest.anchor else ""
    if manifest.delta is None and manifest.anchor is None:
        return "neither a delta nor an anchor"
    if manifest.delta is not None and (manifest.base is None or manifest.base >= version):
        return "a delta without an earlier base"
    if manifest.delta is not None and (
        fault := payload_fault(
            manifest.delta, table, base_digest=manifest.base_digest, to=manifest.digest
        )
    ):
        return fault
    if manifest.anchor is not None:
        return payload_fault(manifest.anchor, table, base_digest=None, to=manifest.digest)
    return ""


def payload_fault(payload: Payload, table: Run, *, base_digest: str | None, to: str) -> str:
    """What is wrong with a payload that leads from ``base_digest`` (None: from nothing) to the
    digest ``to``, in a few words; empty if nothing is."""
    tensors, whole = table.tensors, base_digest is None
    ends = [0] * len(tensors)
    for blob in payload.blobs:
        if blob.bytes > MAX_BLOB_BYTES:
            return f"a blob of {blob.bytes} bytes"
    for piece in sorted(payload.pieces, key=lambda piece: (piece.tensor, piece.start)):
        if piece.tensor >= len(tensors):
            return f"a piece of tensor number {piece.tensor} of {len(tensors)}"
        if piece.blob >= len(payload.blobs):
            return f"a piece in blob number {piece.blob} of {len(payload.blobs)}"
        spec = tensors[piece.tensor]
        if piece.offset + piece.length > payload.blobs[piece.blob].bytes:
            return "a piece ends behind its blob"
        if piece.start + piece.count > spec.count:
            return f"a piece ends behind tensor {spec.name}"
        if piece.count and piece.start // table.chunk != (piece.end - 1) // table.chunk:
            return f"a piece of tensor {spec.name} crosses from one chunk into another"
        if piece.start < ends[piece.tensor] or (whole and piece.start != ends[piece.tensor]):
            return f"pieces of tensor {spec.name} overlap or leave a gap"
        ends[piece.tensor] = piece.start + piece.count
    if whole and any(ends[i] != tensor.count for i, tensor in enumerate(tensors)):
        return "an anchor that does not cover the model"
    if add_sums([base_digest or ZERO_SUM, *(piece.sum for piece in payload.pieces)]) != to:
        return "the sums of its pieces do not lead to its digest"
    return ""


def add_sums(sums: Iterable[str]) -> str:
    """Digests, or differences of digests, added up: two lanes of 64 bits that wrap around."""
    lane0 = lane1 = 0
    for value in sums:
        lane0 += int(value[:16], 16)
        lane1 += int(value[16:], 16)
    return f"{lane0 % _LANE:016x}{lane1 % _LANE:016x}"
