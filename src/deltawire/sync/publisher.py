"""The writing side: one version after another, each committed by its manifest.

Who waits for whom::

    trainer ── publish(weights): copy into the staging buffers ──▶ returns
                                    │ (waits here only while the version before is under way)
    background thread               ▼
        diff against the baseline, encode, digest ▶ blobs ▶ manifest (create-if-absent)
                                                                │ committed
        baseline ⇄ staging, on_commit(receipt) ◀────────────────┘

The baseline is what the newest manifest says. It advances only when that manifest exists, so a
failed version is encoded again from what readers really hold.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import FencedError, InputError, RetryError
from deltawire.store import Bucket
from deltawire.sync.chain import put_blob, read_manifest, with_retries
from deltawire.sync.mirror import Bits, Mirror
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest, Payload, Piece
from deltawire.wire.objects import encode_json
from deltawire.wire.run import Run


@dataclass(frozen=True)
class Receipt:
    """What committing one version took. ``blocked_ms`` is the trainer's part of it."""

    version: int
    digest: str
    bytes_delta: int
    bytes_full: int
    bytes_anchor: int
    changed: int
    elements: int
    blocked_ms: float
    encode_ms: float
    upload_ms: float


class Publisher:
    """Commits versions of one model to one run.

    ``mirror`` is what the bucket's newest version holds; it becomes the publisher's own. With
    ``version`` -1 in it, the run has no version yet and the first `publish` makes version 0, an
    anchor. ``epoch`` must exceed that of every manifest already there. Not for use by several
    threads at once.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        mirror: Mirror,
        *,
        epoch: int,
        anchor_every: int = 50,
        on_commit: Callable[[Receipt], None] | None = None,
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.epoch = epoch
        self._anchor_every = anchor_every
        self._on_commit = on_commit
        self._baseline = mirror
        self._staging = mirror.copy()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._pending: Future[Receipt] | None = None
        self._elements = sum(tensor.count for tensor in run.tensors)
        self._bytes_full = sum(bits.nbytes for bits in mirror.tensors.values())

    @property
    def version(self) -> int:
        """The newest committed version, -1 before the first."""
        return self._baseline.version

    @property
    def digest(self) -> Digest:
        """The digest of the newest committed version."""
        return self._baseline.digest

    def publish(self, tensors: Mapping[str, Any], *, annex: dict[str, Any] | None = None) -> int:
        """Copy ``tensors`` (a name to a contiguous array or CPU tensor of the run's shapes and
        dtypes) and commit them in the background as the next version, which is returned.

        Returns once the copy is made. Waits first for the version before, and raises what that
        one failed with: `FencedError` if another publisher has taken the run, `RetryError` or
        `InputError` from the store. Raises `InputError` if the tensors are not the run's.
        """
        started = time.perf_counter()
        self.flush()
        self._stage(tensors)
        version = self._baseline.version + 1
        blocked_ms = (time.perf_counter() - started) * 1e3
        self._pending = self._pool.submit(self._commit, version, annex or {}, blocked_ms)
        return version

    def flush(self) -> None:
        """Wait until the version under way is committed; raises what it failed with."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Wait for the version under way and end the background thread."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()

    def _stage(self, tensors: Mapping[str, Any]) -> None:
        if tensors.keys() != self._staging.tensors.keys():
            odd = sorted(tensors.keys() ^ self._staging.tensors.keys())
            raise InputError(f"tensors that only one of run and publisher has: {odd[:5]}")
        for spec in self.run.tensors:
            bits = codec.bits_of(tensors[spec.name], spec.dtype)
            shape = tuple(tensors[spec.name].shape)
            if shape != spec.shape:
                raise InputError(f"tensor {spec.name} has shape {shape}, the run's is {spec.shape}")
            self._staging.tensors[spec.name][:] = bits

    def _commit(self, version: int, annex: dict[str, Any], blocked_ms: float) -> Receipt:
        started = time.perf_counter()
        first = self._baseline.version < 0
        delta, digest = (None, None) if first else self._encode_delta()
        anchor: bytes | None = None
        pieces: list[Piece] = []
        if first or version % self._anchor_every == 0:
            anchor, pieces = self._encode_anchor()
        digest = digest or codec.digest_model(self._staging.tensors)
        encoded = time.perf_counter()
        manifest = Manifest(
            version=version,
            base=None if first else version - 1,
            delta=None if delta is None else self._upload(*delta),
            anchor=None if anchor is None else self._upload(anchor, pieces, self._elements),
            digest=digest.hex(),
            epoch=self.epoch,
            nonce=secrets.token_hex(16),
            created_at=time.time(),
            annex=annex,
        )
        with_retries(lambda: self._create(manifest))
        self._staging.version, self._staging.digest = version, digest
        self._baseline, self._staging = self._staging, self._baseline
        receipt = Receipt(
            version=version,
            digest=digest.hex(),
            bytes_delta=manifest.delta.bytes if manifest.delta else 0,
            bytes_full=self._bytes_full,
            bytes_anchor=manifest.anchor.bytes if manifest.anchor else 0,
            changed=manifest.delta.changed if manifest.delta else self._elements,
            elements=self._elements,
            blocked_ms=blocked_ms,
            encode_ms=(encoded - started) * 1e3,
            upload_ms=(time.perf_counter() - encoded) * 1e3,
        )
        if self._on_commit is not None:
            self._on_commit(receipt)
        return receipt

    def _encode_delta(self) -> tuple[tuple[bytes, list[Piece], int], Digest]:
        coded: list[bytes] = []
        pieces: list[Piece] = []
        offset = changed = 0
        digest = self._baseline.digest
        for number, spec in enumerate(self.run.tensors):
            base: Bits = self._baseline.tensors[spec.name]
            target: Bits = self._staging.tensors[spec.name]
            patch = codec.diff(base, target)
            if not len(patch.positions):
                continue
            digest = digest + codec.digest_patch(spec.name, patch, base[patch.positions])
            payload = codec.encode(base, target, dtype=spec.dtype)
            pieces.append(Piece(number, 0, spec.count, 0, offset, len(payload)))
            coded.append(payload)
            offset += len(payload)
            changed += len(patch.positions)
        return (b"".join(coded), pieces, changed), digest

    def _encode_anchor(self) -> tuple[bytes, list[Piece]]:
        coded: list[bytes] = []
        pieces: list[Piece] = []
        offset = 0
        for number, spec in enumerate(self.run.tensors):
            payload = codec.encode_full(self._staging.tensors[spec.name])
            pieces.append(Piece(number, 0, spec.count, 0, offset, len(payload)))
            coded.append(payload)
            offset += len(payload)
        return b"".join(coded), pieces

    def _upload(self, data: bytes, pieces: list[Piece], changed: int) -> Payload:
        blobs = [put_blob(self.bucket, data)] if data else []
        return Payload(blobs=blobs, pieces=pieces, changed=changed)

    def _create(self, manifest: Manifest) -> None:
        """Commit. A create that failed may still have happened: what lies there decides."""
        key = keys.manifest(manifest.version)
        try:
            if self.bucket.create(key, encode_json(manifest)):
                return
        except RetryError:
            if self._stored(manifest):
                return
            raise
        if not self._stored(manifest):
            raise RetryError("the manifest is gone again", run=self.bucket.url, key=key)

    def _stored(self, manifest: Manifest) -> bool:
        found = read_manifest(self.bucket, self.run, manifest.version)
        if found is None:
            return False
        if found.nonce != manifest.nonce:
            raise FencedError(
                "another publisher has committed this version",
                hint="only one trainer may write to a run; this one stops",
                run=self.bucket.url,
                version=manifest.version,
            )
        return True
