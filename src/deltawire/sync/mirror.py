"""The mirror: a host copy of the weights at one version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltawire import codec
from deltawire.codec import Digest, Patch
from deltawire.errors import CorruptError, ResyncError
from deltawire.store import Bucket
from deltawire.sync.chain import get_blob, newest_version, read_manifest
from deltawire.wire.manifest import Manifest, Payload
from deltawire.wire.run import Run

Bits = NDArray[np.unsignedinteger[Any]]


@dataclass
class Mirror:
    """Every tensor's bits as a flat unsigned array, at ``version``, with the model's digest."""

    tensors: dict[str, Bits]
    version: int
    digest: Digest

    def copy(self) -> Mirror:
        """A mirror of its own memory."""
        tensors = {name: bits.copy() for name, bits in self.tensors.items()}
        return Mirror(tensors, self.version, self.digest)

    def apply(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Move forward by patches that were checked before."""
        for name, patch in patches.items():
            codec.apply(patch, self.tensors[name])
        self.version, self.digest = version, digest


def empty_tensors(run: Run) -> dict[str, Bits]:
    """Unset memory for every tensor of the run."""
    return {
        tensor.name: np.empty(tensor.count, codec.unsigned_of(tensor.dtype))
        for tensor in run.tensors
    }


def fetch_anchor(bucket: Bucket, run: Run, manifest: Manifest) -> Mirror:
    """The whole model of a manifest that has an anchor, verified; raises `CorruptError`."""
    if manifest.anchor is None:
        raise ResyncError("not an anchor", run=bucket.url, version=manifest.version)
    tensors = empty_tensors(run)
    blobs = [get_blob(bucket, ref, version=manifest.version) for ref in manifest.anchor.blobs]
    for piece in manifest.anchor.pieces:
        spec = run.tensors[piece.tensor]
        target = tensors[spec.name][piece.start : piece.start + piece.count]
        payload = blobs[piece.blob][piece.offset : piece.offset + piece.length]
        target[:] = codec.decode_full(payload, piece.count, target.itemsize)
    digest = codec.digest_model(tensors)
    _check(digest, manifest, bucket)
    return Mirror(tensors, manifest.version, digest)


def decode_delta(
    bucket: Bucket, run: Run, manifest: Manifest, payload: Payload, mirror: Mirror
) -> tuple[dict[str, Patch], Digest]:
    """The patches from the mirror's version to the manifest's, and the digest they lead to.

    Nothing is changed. Raises `CorruptError` if a blob is missing or damaged, or if the result
    would not be what the manifest says.
    """
    blobs = [get_blob(bucket, ref, version=manifest.version) for ref in payload.blobs]
    parts: dict[str, list[Patch]] = {}
    digest = mirror.digest
    for piece in sorted(payload.pieces, key=lambda piece: (piece.tensor, piece.start)):
        name = run.tensors[piece.tensor].name
        base = mirror.tensors[name][piece.start : piece.start + piece.count]
        coded = blobs[piece.blob][piece.offset : piece.offset + piece.length]
        patch = codec.decode_patch(coded, base)
        patch = Patch(patch.positions + piece.start, patch.bits)
        old = mirror.tensors[name][patch.positions]
        digest = digest + codec.digest_patch(name, patch, old)
        parts.setdefault(name, []).append(patch)
    _check(digest, manifest, bucket)
    return {name: _joined(patches) for name, patches in parts.items()}, digest


def _joined(patches: list[Patch]) -> Patch:
    if len(patches) == 1:
        return patches[0]
    positions = np.concatenate([patch.positions for patch in patches])
    return Patch(positions, np.concatenate([patch.bits for patch in patches]))


def _check(digest: Digest, manifest: Manifest, bucket: Bucket) -> None:
    if digest.hex() != manifest.digest:
        raise CorruptError(
            f"the weights' digest is {digest.hex()}, the manifest says {manifest.digest}",
            run=bucket.url,
            version=manifest.version,
        )


def load_mirror(bucket: Bucket, run: Run, *, at: int | None = None) -> Mirror | None:
    """The mirror at version ``at`` (the newest if None): the nearest anchor, then deltas.

    None if nothing is committed yet. An anchor that is damaged is passed over for an older one;
    raises `CorruptError` when no path is left.
    """
    target = newest_version(bucket) if at is None else at
    if target is None:
        return None
    failure: CorruptError | None = None
    chain: list[Manifest] = []
    for version in range(target, -1, -1):
        manifest = read_manifest(bucket, run, version)
        if manifest is None:
            failure = failure or CorruptError(
                "a manifest is missing", run=bucket.url, version=version
            )
            break
        if manifest.anchor is not None:
            try:
                return _replay(bucket, run, fetch_anchor(bucket, run, manifest), chain)
            except CorruptError as error:
                failure = failure or error
        if manifest.delta is None:
            break
        chain.append(manifest)
    raise failure or CorruptError("no anchor leads to this version", run=bucket.url, version=target)


def _replay(bucket: Bucket, run: Run, mirror: Mirror, chain: list[Manifest]) -> Mirror:
    for manifest in reversed(chain):
        if manifest.delta is None or manifest.base != mirror.version:
            raise CorruptError("the chain is broken", run=bucket.url, version=manifest.version)
        patches, digest = decode_delta(bucket, run, manifest, manifest.delta, mirror)
        mirror.apply(patches, manifest.version, digest)
    return mirror
