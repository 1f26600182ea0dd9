"""Uploads anchors, and lists blobs of the previous anchor again where nothing in them has changed.

A blob is listed again only if all of its bytes are pieces of this writer whose elements still have
the digests that the previous anchor states. So no anchor keeps bytes that nobody needs, and a blob
that is lost can be encoded again from the weights. Elements that have not changed since the
previous anchor, or that never change, go to other blobs than the rest: the frozen base of an
adapter run crosses once::

    anchor 0      [ frozen ][ frozen ][ adapter ]
    anchor 50     [ the same blobs   ][ adapter ]       uploads one blob

Retention keeps a blob while any kept version lists it, so an anchor may outlive those before it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec
from blake3 import blake3

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError
from deltawire.store import Bucket, in_parallel
from deltawire.sync.chain.objects import (
    committed_versions,
    later_anchors,
    missing_blobs,
    put_blob,
    read_compacted_delta,
    read_manifest,
)
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.publish.encoding import (
    BLOB_BYTES,
    BlobWriter,
    Chunk,
    bits_at,
    encode_anchors,
)
from deltawire.wire import keys
from deltawire.wire.manifest import CompactedDelta, Manifest
from deltawire.wire.payload import BlobRef, Payload, PayloadRef, Piece
from deltawire.wire.run import Run

NOTHING = Payload((), ())
WINDOW = 32
"""Manifests read at a time, to find the newest anchor."""

NEAR = 256
"""Versions below the newest among which its anchor is sought first: a listing of all takes a
request for each thousand."""

SEPARATE = 1 / 32
"""Unchanged elements of at least this share of a full blob's bytes get blobs without others."""


def upload_anchor(
    bucket: Bucket,
    run: Run,
    chunks: Sequence[Chunk],
    target: Mirror,
    *,
    sums: Mapping[Chunk, Digest] | None = None,
    before: Payload = NOTHING,
    frozen: Container[str] = (),
    threads: int | None = None,
    blob_bytes: int = BLOB_BYTES,
) -> Payload:
    """Encodes and uploads all of ``target``, except the blobs of ``before`` that still hold.

    ``before`` is the previous anchor and ``sums`` the digests of the target's chunks. Tensors named
    in ``frozen`` never change: their blobs hold nothing else.
    """
    kept = _unchanged_blobs(bucket, chunks, sums or {}, before)
    listed = {(piece.tensor, piece.start) for piece in kept.pieces}
    rest = [chunk for chunk in chunks if (chunk.tensor, chunk.start) not in listed]
    still = [chunk for chunk in rest if chunk.name in frozen]
    if not still:
        still = _unchanged(rest, sums or {}, before)
        size = sum(bits_at(target, chunk).nbytes for chunk in still)
        still = still if size >= SEPARATE * blob_bytes else []
    apart = set(still)
    with BlobWriter(bucket, blob_bytes=blob_bytes) as writer:
        for group in (still, [chunk for chunk in rest if chunk not in apart]):
            for coded in encode_anchors(group, run, target, threads=threads):
                assert coded.payload is not None
                writer.add(coded.chunk, coded.payload, coded.change)
            writer.close_blob()
        made = writer.finish()
    return _joined(kept, made)


def find_anchor(bucket: Bucket, run: Run, *, newest: int) -> Payload:
    """Reads the newest anchor up to version ``newest``; one without pieces if there is none that
    can be read. Manifests are read many at a time, from the newest down."""

    def read(version: int) -> tuple[Manifest | CompactedDelta, PayloadRef] | bool:
        """Returns the anchor of a version, or whether an older version may have one."""
        with suppress(CorruptError):
            if version in later:
                made = read_compacted_delta(bucket, run, None, version)
                if made is not None:
                    return made, made.payload
            manifest = read_manifest(bucket, run, version)
            if manifest is not None and manifest.anchor is not None:
                return manifest, manifest.anchor
            return manifest is None or not manifest.pruned
        return True

    size = 1 if bucket.local else WINDOW
    below = newest + 1
    for first in (max(newest - NEAR, 0), 0):
        listed = committed_versions(bucket, newer_than=first - 1)
        later = set(later_anchors(bucket, newer_than=first - 1))
        versions = [version for version in listed if version < below]
        below = first
        for end in range(len(versions), 0, -size):
            window = versions[max(end - size, 0) : end]
            for found in reversed(in_parallel(bucket, read, window)):
                if found is False:
                    return NOTHING
                if isinstance(found, tuple):
                    with suppress(CorruptError):
                        return read_payload(bucket, run, *found)
        if first == 0:
            break
    return NOTHING


def restore_anchor(bucket: Bucket, run: Run, anchor: Payload, target: Mirror) -> None:
    """Encodes and uploads the blobs of ``anchor``, the weights in ``target``, that are missing.

    Raises `CorruptError` for a blob that another encoder made.
    """
    by_blob: dict[str, list[Piece]] = {}
    for piece in anchor.pieces:
        by_blob.setdefault(anchor.blobs[piece.blob].hash, []).append(piece)
    for ref in missing_blobs(bucket, anchor.blobs):
        pieces = sorted(by_blob.get(ref.hash, ()), key=lambda piece: piece.offset)
        data = b"".join(_encoded(run, piece, target) for piece in pieces)
        if blake3(data).hexdigest() != ref.hash:
            raise CorruptError(
                "a blob of this version's anchor is gone, and encoding it again made another",
                hint="start the trainer again: it continues from the newest version",
                run=bucket.url,
                key=keys.blob(ref.hash),
            )
        put_blob(bucket, data)


def _encoded(run: Run, piece: Piece, target: Mirror) -> bytes:
    spec = run.tensors[piece.tensor]
    bits = bits_at(target, Chunk(piece.tensor, spec.name, piece.start, piece.count))
    return codec.encode_full(bits, spec.dtype, threads=1)


def _unchanged(
    chunks: Iterable[Chunk], sums: Mapping[Chunk, Digest], before: Payload
) -> list[Chunk]:
    """Returns the chunks that the previous anchor states with the same digest."""
    stated = {(piece.tensor, piece.start, piece.count): piece.sum for piece in before.pieces}
    if not stated:
        return []
    return [
        chunk
        for chunk in chunks
        if chunk in sums
        and stated.get((chunk.tensor, chunk.start, chunk.count)) == sums[chunk].hex()
    ]


def _unchanged_blobs(
    bucket: Bucket, chunks: Sequence[Chunk], sums: Mapping[Chunk, Digest], before: Payload
) -> Payload:
    """Returns the part of an anchor whose blobs exist and are filled by unchanged chunks."""
    places = {(c.tensor, c.start, c.count) for c in _unchanged(chunks, sums, before)}
    if not places:
        return NOTHING
    by_blob: dict[int, list[Piece]] = {}
    for piece in before.pieces:
        by_blob.setdefault(piece.blob, []).append(piece)
    usable = {
        number: before.blobs[number]
        for number, pieces in by_blob.items()
        if all((piece.tensor, piece.start, piece.count) in places for piece in pieces)
        and _fills(pieces, before.blobs[number])
    }
    lost = {ref.hash for ref in missing_blobs(bucket, list(usable.values()))}
    kept = [number for number, ref in usable.items() if ref.hash not in lost]
    return Payload(
        [before.blobs[number] for number in kept],
        [
            msgspec.structs.replace(piece, blob=place)
            for place, number in enumerate(kept)
            for piece in by_blob[number]
        ],
    )


def _fills(pieces: Sequence[Piece], blob: BlobRef) -> bool:
    """Returns whether pieces are a blob's bytes from first to last, without a gap or overlap."""
    at = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset != at:
            return False
        at += piece.length
    return at == blob.bytes


def _joined(kept: Payload, made: Payload) -> Payload:
    shift = len(kept.blobs)
    moved = [msgspec.structs.replace(piece, blob=piece.blob + shift) for piece in made.pieces]
    pieces = sorted([*kept.pieces, *moved], key=lambda piece: (piece.tensor, piece.start))
    return Payload([*kept.blobs, *made.blobs], pieces)
