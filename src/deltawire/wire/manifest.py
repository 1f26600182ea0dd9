"""Defines manifests, the small objects whose creation commits a version, and compacted deltas,
which give readers shorter routes to one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire import keys
from deltawire.wire.objects import FORMAT, check_raw, decode_json
from deltawire.wire.payload import (
    ZERO_SUM,
    Index,
    Payload,
    PayloadRef,
    Sum,
    payload_fault,
    ref_fault,
)
from deltawire.wire.piece_table import decode_table
from deltawire.wire.run import MAX_MODEL_FILES, Build, Identity, ModelFile, Run
from deltawire.wire.seal import Signer, check_seal, seal, unseal

MAX_MANIFEST_BYTES = 2 << 20
MAX_METADATA_BYTES = 1 << 20

Line = Literal["main"]
"""Further lines of versions in one run are reserved: readers refuse what they do not follow."""


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """A committed version, stored as a delta from its base, as an anchor, or both.

    ``run`` is the run's id. ``digest`` is that of the whole model at this version, ``base_digest``
    that at its base. ``epoch`` counts the writers that a run has had, ``nonce`` tells two of them
    apart. ``metadata`` belongs to the application: the trainer records there which groups the
    version consumed, so that one create commits both. ``build`` is the writer's. ``model_files``
    are the other files of the version's directory where those are not run.json's. A ``pruned``
    version is closed: retention has deleted its payloads and left this tombstone so that the name
    is never free again.
    """

    run: Identity
    version: Index
    line: Line = "main"
    base: Index | None = None
    base_digest: Sum = ZERO_SUM
    delta: PayloadRef | None = None
    anchor: PayloadRef | None = None
    digest: Sum
    epoch: Index
    nonce: Annotated[str, Meta(max_length=64)]
    created_at: float
    pruned: bool = False
    model_files: Annotated[list[ModelFile], Meta(max_length=MAX_MODEL_FILES)] | None = None
    metadata: dict[str, Any] = {}
    build: Build = ""

    @property
    def payloads(self) -> list[PayloadRef]:
        """Whichever of delta and anchor the version has."""
        return [ref for ref in (self.delta, self.anchor) if ref is not None]

    def leads_from(self, ref: PayloadRef) -> str | None:
        """Returns the digest that one of its payloads builds on, None for an anchor."""
        return None if ref is self.anchor else self.base_digest


class CompactedDelta(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """A shortcut to ``version`` that commits nothing: one stride from an earlier ``base``, or,
    without a base, an anchor that was made after its version.
    """

    run: Identity
    version: Index
    line: Line = "main"
    base: Index | None = None
    base_digest: Sum = ZERO_SUM
    payload: PayloadRef
    digest: Sum
    created_at: float

    @property
    def payloads(self) -> list[PayloadRef]:
        """The payload, as a list of one."""
        return [self.payload]

    def leads_from(self, _: PayloadRef) -> str | None:
        """Returns the digest that its payload builds on, None for an anchor."""
        return None if self.base is None else self.base_digest


class _Metadata(msgspec.Struct):
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


def encode_manifest(manifest: Manifest, *, signer: Signer | None = None) -> bytes:
    """Encodes the object at the manifest's key."""
    return seal(manifest, key=keys.manifest(manifest.version), signer=signer)


def encode_compacted(compacted: CompactedDelta, *, signer: Signer | None = None) -> bytes:
    """Encodes the object at the compacted delta's key."""
    return seal(compacted, key=keys.compacted(compacted.base, compacted.version), signer=signer)


def decode_manifest(data: bytes, *, version: int, table: Run, run: str, key: str) -> Manifest:
    """Parses a manifest and checks it against the run; raises `CorruptError`.

    A payload whose piece table is a separate blob is checked when the table is read (see
    `check_payload`).
    """
    check_seal(data, "manifest", run=run, key=key)
    outline = decode_json(data, _Metadata, run=run, key=key, what="manifest")
    check_raw(outline.metadata, MAX_METADATA_BYTES, "metadata", run=run, key=key)
    manifest = unseal(data, Manifest, run=run, key=key)
    if fault := _manifest_fault(manifest, version, table):
        raise CorruptError(f"manifest: {fault}", run=run, version=version, key=key)
    _check_inline(manifest, table, run=run, key=key)
    return manifest


def decode_compacted(
    data: bytes, *, base: int | None, version: int, table: Run, run: str, key: str
) -> CompactedDelta:
    """Parses a compacted delta and checks it against the run; raises `CorruptError`."""
    compacted = unseal(data, CompactedDelta, run=run, key=key, what="compacted delta")
    fault = _identity_fault(compacted, version, table)
    if not fault and compacted.base != base:
        fault = f"it says base {compacted.base}"
    if not fault and base is not None and base >= version:
        fault = "a compacted delta without an earlier base"
    if fault:
        raise CorruptError(f"compacted delta: {fault}", run=run, version=version, key=key)
    _check_inline(compacted, table, run=run, key=key)
    return compacted


def check_payload(
    stated: Manifest | CompactedDelta, ref: PayloadRef, payload: Payload, table: Run, *, run: str
) -> None:
    """Raises `CorruptError` unless ``payload``, read whole, matches ``stated``.

    Every piece must lie inside its tensor, its chunk and its blob, an anchor must cover every
    tensor, pieces ascend and do not overlap, and their sums must lead from the base's digest to
    the version's.
    """
    fault = payload_fault(payload, table, base_digest=stated.leads_from(ref), to=stated.digest)
    if fault:
        raise CorruptError(f"payload: {fault}", run=run, version=stated.version)


def _check_inline(stated: Manifest | CompactedDelta, table: Run, *, run: str, key: str) -> None:
    for ref in stated.payloads:
        if ref.table_blob is None:
            try:
                payload = decode_table(ref.table.inline, ref, table)
                check_payload(stated, ref, payload, table, run=run)
            except CorruptError as error:
                raise CorruptError(
                    error.message, run=run, version=stated.version, key=key
                ) from error


def _identity_fault(value: Manifest | CompactedDelta, version: int, table: Run) -> str:
    if value.run != table.id:
        return "it belongs to another run"
    if value.version != version:
        return f"it says version {value.version}"
    return next(filter(None, map(ref_fault, value.payloads)), "")


def _manifest_fault(manifest: Manifest, version: int, table: Run) -> str:
    if fault := _identity_fault(manifest, version, table):
        return fault
    if version == 0 and manifest.digest != table.digest:
        return "its digest is not the one run.json states for version 0"
    if manifest.pruned:
        return _tombstone_fault(manifest)
    if not manifest.payloads:
        return "neither a delta nor an anchor"
    if manifest.delta is not None and (manifest.base is None or manifest.base >= version):
        return "a delta without an earlier base"
    if manifest.delta is None and manifest.base is not None:
        return "a base without a delta"
    if version == 0 and manifest.anchor is None:
        return "the first version without an anchor"
    return ""


def _tombstone_fault(manifest: Manifest) -> str:
    if manifest.payloads or manifest.model_files is not None:
        return "pruned, but with a payload or files"
    if manifest.base is not None or manifest.base_digest != ZERO_SUM:
        return "pruned, but with a base"
    return ""
