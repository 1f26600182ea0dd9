"""Merges the parts of many writers into the manifest that commits them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deltawire.builds import build_name
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket, in_parallel
from deltawire.sync.chain.payloads import read_table, store_payload
from deltawire.wire.coordination import Part
from deltawire.wire.manifest import Manifest
from deltawire.wire.payload import BlobRef, Payload, PayloadRef, Piece, add_sums, payload_fault
from deltawire.wire.run import ModelFile, Run


def merge_parts(
    bucket: Bucket,
    run: Run,
    parts: Sequence[Part],
    *,
    base: int | None,
    base_digest: str,
    nonce: str,
    metadata: dict[str, Any] | None = None,
    files: list[ModelFile] | None = None,
    stored: Mapping[PayloadRef, Payload] | None = None,
) -> tuple[Manifest, list[Payload]]:
    """Builds the manifest that commits all ``parts`` of a version, and checks it as a reader does.
    Returns it with its payloads, whose piece tables are stored. Payloads in ``stored`` are not read
    again.

    Raises `InputError` if parts overlap, leave a gap, build on different bases, or do not lead from
    the base to the sum of the parts' digests. In the last case, the mirror of at least one writer
    differs from the base, and no reader could decode the version.
    """
    version, first = parts[0].version, parts[0].version == 0
    if any(part.base_digest != base_digest for part in parts):
        raise InputError("the ranks build on different weights", run=bucket.url, version=version)
    known = stored or {}
    changes, whole = [part.delta for part in parts], [part.anchor for part in parts]
    delta = None if first else merge_payloads(bucket, run, changes, known)
    anchor = merge_payloads(bucket, run, whole, known) if any(whole) else None
    payload = anchor if delta is None else delta
    if payload is None:
        raise InputError("the first version has no anchor", run=bucket.url, version=version)
    digest = add_sums([base_digest, *(piece.sum for piece in payload.pieces)])
    for merged, start in ((delta, base_digest), (anchor, None)):
        fault = "" if merged is None else payload_fault(merged, run, base_digest=start, to=digest)
        if fault:
            raise InputError(
                f"the ranks' parts do not fit together: {fault}", run=bucket.url, version=version
            )
    if first and digest != run.digest:
        raise InputError(
            "the first version is not the model that run.json was written for",
            run=bucket.url,
            version=version,
        )
    if add_sums([part.digest for part in parts]) != digest:
        raise InputError(
            f"the mirrors of the {len(parts)} ranks do not add up to version {base}",
            hint="at least one differs from the run: load all of them again",
            run=bucket.url,
            version=version,
        )

    manifest = Manifest(
        run=run.id,
        version=version,
        base=base,
        base_digest=base_digest,
        delta=_store(bucket, run, version, delta, known),
        anchor=_store(bucket, run, version, anchor, known),
        digest=digest,
        epoch=parts[0].epoch,
        nonce=nonce,
        created_at=time.time(),
        model_files=files,
        metadata=metadata or {},
        build=build_name(),
    )
    return manifest, [payload for payload in (delta, anchor) if payload is not None]


def _store(
    bucket: Bucket,
    run: Run,
    version: int,
    payload: Payload | None,
    stored: Mapping[PayloadRef, Payload],
) -> PayloadRef | None:
    """Stores a merged payload's piece table, unless it is that of the only writer's part."""
    if payload is None:
        return None
    for ref, own in stored.items():
        if own == payload:
            return ref
    return store_payload(bucket, run, payload, version=version)


def merge_payloads(
    bucket: Bucket,
    run: Run,
    refs: list[PayloadRef | None],
    stored: Mapping[PayloadRef, Payload],
) -> Payload:
    """Merges the parts' payloads: pieces ascend, and refer to their blobs by the new numbers."""
    present = [ref for ref in refs if ref is not None]
    if len(present) < len(refs):
        raise CorruptError("a part lacks a payload that the others have", run=bucket.url)
    blobs: list[BlobRef] = []
    pieces: list[Piece] = []
    for payload in in_parallel(
        bucket, lambda ref: stored.get(ref) or read_table(bucket, run, ref), present
    ):
        shift = len(blobs)
        blobs += payload.blobs
        pieces += (
            msgspec.structs.replace(piece, blob=piece.blob + shift) for piece in payload.pieces
        )
    return Payload(blobs, sorted(pieces, key=lambda piece: (piece.tensor, piece.start)))
