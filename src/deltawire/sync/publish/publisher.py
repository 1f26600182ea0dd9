"""The writing side: one version after another, each committed by its manifest.

Who waits for whom::

    trainer ── publish(weights): copy into the staging buffers ──▶ returns
                                    │ (waits here only while the version before is under way,
                                    │  or, with the policy "fold", not at all)
    background thread               ▼
        encode against the baseline, digest ▶ blobs ▶ manifest (create-if-absent)
                                                                │ committed
        baseline ⇄ staging, on_commit(receipt) ◀────────────────┤
    folding thread: fold what is due (see `folding`) ◀──────────┘

The baseline is what the newest manifest says. It advances only when that manifest exists, so a
failed version is encoded again from what readers really hold.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, FencedError, InputError, RetryError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import (
    check_signer,
    check_size,
    newest_retention_floor,
    read_manifest,
    with_retries,
)
from deltawire.sync.follow.mirror import Bits, Mirror
from deltawire.sync.maintain.compaction import COMPACTION_STRIDES, CompactionThread
from deltawire.sync.publish.encoding import (
    BLOB_BYTES,
    Chunk,
    chunks_of,
    digest_chunks,
    keep_blobs,
    upload_anchor,
    upload_delta,
)
from deltawire.sync.publish.parallel_copy import Copier
from deltawire.sync.publish.tied_tensors import place_of
from deltawire.wire import keys
from deltawire.wire.manifest import MAX_METADATA_BYTES, Manifest, Payload, encode_manifest
from deltawire.wire.run import ModelFile, Run, TensorSpec
from deltawire.wire.seal import Signer

CommitMetadata = dict[str, Any]
Policy = Literal["wait", "fold"]


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


@dataclass
class Cadence:
    """When a version is stored whole as well: every so many versions, when the deltas since the
    last anchor exceed ``share`` of its bytes, when it is ``seconds`` old. 0 is never."""

    every: int = 50
    share: float = 0.0
    seconds: float = 0.0
    _since: int = 0
    _anchor_bytes: int = 0
    _at: float = 0.0

    def due(self, version: int) -> bool:
        """Whether ``version`` is to be an anchor."""
        if self.every and version % self.every == 0:
            return True
        if self.share and self._anchor_bytes and self._since > self.share * self._anchor_bytes:
            return True
        return bool(self.seconds) and time.monotonic() - self._at > self.seconds

    def committed(self, manifest: Manifest) -> None:
        """Count a version."""
        if manifest.anchor is not None:
            self._since, self._anchor_bytes = 0, manifest.anchor.bytes
            self._at = time.monotonic()
        elif manifest.delta is not None:
            self._since += manifest.delta.bytes


@dataclass
class _Step:
    """Weights on their way to be a version."""

    version: int
    metadata: CommitMetadata
    blocked_ms: float
    files: list[ModelFile] | None = None
    expected: Digest | None = None
    torn: bool = False
    """Whether other weights are being copied over these."""


class Publisher:
    """Commits versions of one model to one run.

    ``mirror`` is what the bucket's newest version holds; it becomes the publisher's own. With
    ``version`` -1 in it, the run has no version yet and the first `publish` makes version 0, an
    anchor. ``epoch`` must exceed that of every manifest already there.

    ``policy`` says what `publish` does while a version is under way: ``wait`` for it, or ``fold``:
    copy, return, and let the next version be the newest weights there are when its turn comes.
    Weights that were overtaken so are never a version of their own; their metadata are given to
    ``merge(earlier, later)``, and are refused if there is none. It takes the memory of one more
    model. ``threads`` copy and encode; blobs are closed at ``blob_bytes``.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        mirror: Mirror,
        *,
        epoch: int,
        anchor_every: int = 50,
        anchor_share: float = 0.0,
        anchor_seconds: float = 0.0,
        fold_strides: Sequence[int] = COMPACTION_STRIDES,
        policy: Policy = "wait",
        merge: Callable[[CommitMetadata, CommitMetadata], CommitMetadata] | None = None,
        signer: Signer | None = None,
        threads: int | None = None,
        blob_bytes: int = BLOB_BYTES,
        on_commit: Callable[[Receipt], None] | None = None,
    ) -> None:
        check_signer(bucket, run, signer)
        self.bucket = bucket
        self.run = run
        self.epoch = epoch
        self._signer = signer
        self._policy = policy
        self._merge = merge
        self._threads = threads
        self._blob_bytes = blob_bytes
        self._on_commit = on_commit
        self._cadence = Cadence(anchor_every, anchor_share, anchor_seconds, _at=time.monotonic())
        if mirror.version < 0:
            # Memory that was never written is only taken when it is: not while a trainer waits.
            for bits in mirror.tensors.values():
                bits.fill(0)
        self._baseline = mirror
        self._staging = mirror.copy()
        self._spare = mirror.copy() if policy == "fold" else None
        self._queued: _Step | None = None
        self._promised = mirror.version
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._copier = Copier(threads)
        self._pending: Future[None] | None = None
        self._fenced: FencedError | None = None
        self._attempts: dict[str, Manifest] = {}
        self._uncertain: tuple[_Step, Manifest, dict[Chunk, Digest]] | None = None
        self._last_anchor: int | None = None
        self._chunks = chunks_of(run, mirror)
        self._sums: dict[Chunk, Digest] = {}
        if mirror.version >= 0:
            self._sums = digest_chunks(self._chunks, mirror, threads=threads)
            _check_sums(self._sums, mirror, bucket)
        self._elements = sum(tensor.count for tensor in run.tensors)
        self._bytes_full = sum(bits.nbytes for bits in mirror.tensors.values())
        self.compaction = CompactionThread(
            bucket, run, fold_strides, signer=signer, threads=threads, blob_bytes=blob_bytes
        )

    @property
    def version(self) -> int:
        """The newest committed version, -1 before the first."""
        return self._baseline.version

    @property
    def digest(self) -> Digest:
        """The digest of the newest committed version."""
        return self._baseline.digest

    def publish(
        self,
        tensors: Mapping[str, Any],
        *,
        metadata: CommitMetadata | None = None,
        files: list[ModelFile] | None = None,
        expected: Digest | None = None,
    ) -> int:
        """Copy ``tensors`` (a name to a contiguous array or CPU tensor of the run's shapes and
        dtypes; of tied ones, any name or all) and commit them in the background as the next
        version, which is returned.

        Returns once the copy is made. Waits first for the version before, unless the policy is
        ``fold``, and raises what that one failed with: `FencedError` if another publisher has
        taken the run, `RetryError` or `InputError` from the store. Raises `InputError` if the
        tensors are not the run's, or the metadata too large.

        ``files``, blobs that are there already, are the other files of the model's directory, if
        they are not those of run.json. With ``expected``, weights of another digest are not
        committed: whoever reads them from files that somebody may write to wants to know.
        """
        started = time.perf_counter()
        metadata = metadata or {}
        if len(msgspec.json.encode(metadata)) > MAX_METADATA_BYTES:
            raise InputError(f"the metadata has more than {MAX_METADATA_BYTES} bytes")
        if self._policy == "fold":
            return self._publish_or_fold(tensors, metadata, started, files, expected)
        self.flush()
        self._settle()
        self._copier.copy(self._pairs(tensors, self._staging))
        blocked_ms = (time.perf_counter() - started) * 1e3
        step = _Step(self._baseline.version + 1, metadata, blocked_ms, files, expected)
        self._pending = self._pool.submit(self._commit, step)
        return step.version

    def flush(self) -> None:
        """Wait until the version under way is committed; raises what it failed with."""
        if self._fenced is not None:
            self._pending = None
            raise self._fenced
        if self._pending is not None:
            try:
                self._pending.result()
            finally:
                # An interrupt while waiting leaves it under way: it must not be forgotten.
                if self._pending.done():
                    self._pending = None

    def close(self) -> None:
        """Wait for the version under way and the folds that are due, and end the threads."""
        try:
            if self._pending is not None:
                self.flush()
        finally:
            self._pool.shutdown()
            self._copier.close()
            self.compaction.close()

    def _publish_or_fold(
        self,
        tensors: Mapping[str, Any],
        metadata: CommitMetadata,
        started: float,
        files: list[ModelFile] | None,
        expected: Digest | None,
    ) -> int:
        assert self._spare is not None
        if self._pending is not None and self._pending.done():
            self.flush()
        if self._fenced is not None:
            raise self._fenced
        if self._pending is None:
            self._settle()
        with self._lock:
            waiting = self._queued
            if waiting is not None and (metadata or waiting.metadata):
                if self._merge is None:
                    raise InputError(
                        "these weights would be folded into others, and their metadata lost",
                        hint="pass merge=, or the policy wait",
                    )
                metadata = self._merge(waiting.metadata, metadata)
            pairs = self._pairs(tensors, self._spare)
            if waiting is not None:
                waiting.torn = True  # Unless what replaces it is there whole.
            self._copier.copy(pairs)
            blocked_ms = (time.perf_counter() - started) * 1e3
            if waiting is not None:
                version = waiting.version
            elif self._pending is not None:
                version = self._promised + 1
            else:
                version = self._baseline.version + 1
            if waiting is None:
                # First, though it waits for the lock: a step without somebody to commit it would
                # never be one.
                self._pending = self._pool.submit(self._commit_queued, self._pending)
            self._queued = _Step(version, metadata, blocked_ms, files, expected)
            self._promised = version
            return version

    def _commit_queued(self, behind: Future[None] | None) -> None:
        try:
            if behind is not None:
                behind.result()  # What the step before failed with, this one fails with.
        except BaseException:
            with self._lock:
                self._queued = None
            raise
        with self._lock:
            assert self._spare is not None
            step, self._queued = self._queued, None
            if step is None:
                return  # Whoever was to queue it was interrupted.
            if step.torn:
                raise InputError(
                    "copying other weights over those that waited was interrupted",
                    hint="publish again",
                    run=self.bucket.url,
                    version=step.version,
                )
            self._staging, self._spare = self._spare, self._staging
        self._commit(step)

    def _pairs(self, tensors: Mapping[str, Any], staging: Mirror) -> list[tuple[Bits, Bits]]:
        """What is to be copied: places in ``staging``, and the bits for them, all checked."""
        given: dict[str, Any] = {}
        tied: list[tuple[str, Any]] = []
        for name, value in tensors.items():
            stored = self.run.aliases.get(name, name)
            first = given.setdefault(stored, value)
            if first is value:
                continue
            place = place_of(value)
            if place is None or place != place_of(first):  # Another memory, of the same bits?
                tied.append((stored, value))
        if given.keys() != staging.tensors.keys():
            odd = sorted(given.keys() ^ staging.tensors.keys())
            raise InputError(f"tensors that only one of run and publisher has: {odd[:5]}")
        specs = {spec.name: spec for spec in self.run.tensors}
        found = {spec.name: self._bits(spec, given[spec.name]) for spec in self.run.tensors}
        for name, value in tied:
            if not np.array_equal(self._bits(specs[name], value), found[name]):
                raise InputError(
                    f"tensor {name} is tied to another in this run, and the two differ",
                    hint="publish tensors that are not tied to a run that was begun so",
                    run=self.bucket.url,
                )
        return [(staging.tensors[name], bits) for name, bits in found.items()]

    def _bits(self, spec: TensorSpec, value: Any) -> Bits:
        try:
            bits = codec.bits_of(value, spec.dtype)
        except InputError as error:
            raise InputError(
                f"tensor {spec.name}: {error.message}", hint=error.hint, run=self.bucket.url
            ) from error
        if (shape := tuple(value.shape)) != spec.shape:
            raise InputError(f"tensor {spec.name} has shape {shape}, the run's is {spec.shape}")
        return bits

    def _commit(self, step: _Step) -> None:
        try:
            self._commit_step(step)
        except FencedError as error:
            self._fenced = error
            raise

    def _commit_step(self, step: _Step) -> None:
        started = time.perf_counter()
        first = self._baseline.version < 0
        if not first and self._last_anchor is None:
            with_retries(self._read_head)
        if not first:
            delta, sums = self._upload_delta()
        else:
            delta = None
            sums = digest_chunks(self._chunks, self._staging, threads=self._threads)
        digest = sum(sums.values(), codec.ZERO)
        if first and digest.hex() != self.run.digest:
            raise InputError(
                "the first version is not the model that run.json was written for",
                run=self.bucket.url,
                version=step.version,
            )
        if step.expected is not None and digest != step.expected:
            raise InputError(
                "the weights changed while they were copied",
                hint="publish them once they are whole",
                run=self.bucket.url,
                version=step.version,
            )
        anchor = self._upload_anchor() if first or self._cadence.due(step.version) else None
        encoded = time.perf_counter()
        manifest = Manifest(
            run=self.run.id,
            version=step.version,
            base=None if first else step.version - 1,
            base_digest=codec.ZERO.hex() if first else self._baseline.digest.hex(),
            delta=delta,
            anchor=anchor,
            digest=digest.hex(),
            last_anchor=step.version if anchor is not None else self._last_anchor,
            epoch=self.epoch,
            nonce=secrets.token_hex(16),
            created_at=time.time(),
            model_files=step.files,
            metadata=step.metadata,
        )
        data = encode_manifest(manifest, signer=self._signer)
        check_size(self.bucket, manifest, data)
        # Remembered before the first attempt, forgotten when it is known what became of it.
        self._attempts[manifest.nonce] = manifest
        self._uncertain = (step, manifest, sums)
        with_retries(lambda: self._create(manifest, data))
        self._confirm(manifest)
        self._advance(step, manifest, sums, encoded - started, time.perf_counter() - encoded)

    def _advance(
        self,
        step: _Step,
        manifest: Manifest,
        sums: dict[Chunk, Digest],
        encode_s: float,
        upload_s: float,
    ) -> None:
        digest = Digest.from_hex(manifest.digest)
        self._staging.version, self._staging.digest = manifest.version, digest
        self._baseline, self._staging = self._staging, self._baseline
        self._sums, self._uncertain = sums, None
        self._attempts.clear()
        self._last_anchor = manifest.last_anchor
        self._cadence.committed(manifest)
        self.compaction.wake(manifest.version)
        if self._on_commit is not None:
            self._on_commit(
                Receipt(
                    version=manifest.version,
                    digest=manifest.digest,
                    bytes_delta=manifest.delta.bytes if manifest.delta else 0,
                    bytes_full=self._bytes_full,
                    bytes_anchor=manifest.anchor.bytes if manifest.anchor else 0,
                    changed=manifest.delta.changed if manifest.delta else self._elements,
                    elements=self._elements,
                    blocked_ms=step.blocked_ms,
                    encode_ms=encode_s * 1e3,
                    upload_ms=upload_s * 1e3,
                )
            )

    def _confirm(self, manifest: Manifest) -> None:
        """Behind a commit: it counts unless it was closed meanwhile, and its blobs stay."""
        if with_retries(lambda: newest_retention_floor(self.bucket)) > manifest.version:
            raise self._fence(manifest.version, "retention has closed this version meanwhile")
        self._keep_blobs(manifest)

    def _keep_blobs(self, manifest: Manifest) -> None:
        """What retention has taken between upload and commit, or is about to, is put again."""
        payloads = [p for p in (manifest.delta, manifest.anchor) if p is not None]

        def again() -> list[Payload]:
            made = [] if manifest.delta is None else [self._upload_delta()[0]]
            return made if manifest.anchor is None else [*made, self._upload_anchor()]

        keep_blobs(self.bucket, self.run, payloads, again)

    def _upload_delta(self) -> tuple[Payload, dict[Chunk, Digest]]:
        """The payload, and the staged weights' digests by chunk."""
        return upload_delta(
            self.bucket, self.run, self._chunks, self._baseline, self._staging, self._sums,
            threads=self._threads, blob_bytes=self._blob_bytes,
        )  # fmt: skip

    def _upload_anchor(self) -> Payload:
        return upload_anchor(
            self.bucket, self.run, self._chunks, self._staging,
            threads=self._threads, blob_bytes=self._blob_bytes,
        )  # fmt: skip

    def _read_head(self) -> None:
        """What the newest manifest says, before building on it."""
        head = read_manifest(self.bucket, self.run, self._baseline.version)
        if head is None or head.digest != self._baseline.digest.hex() or head.epoch > self.epoch:
            raise FencedError(
                "the version that this publisher builds on is not the run's",
                hint="load the newest version again, and take a higher epoch",
                run=self.bucket.url,
                version=self._baseline.version,
            )
        self._last_anchor = head.version if head.anchor is not None else head.last_anchor

    def _create(self, manifest: Manifest, data: bytes) -> None:
        """Commit. A create that failed may still have happened: what lies there decides."""
        key = keys.manifest(manifest.version)
        try:
            made = self.bucket.create(key, data)
        except RetryError:
            if self._stored(manifest):
                return
            raise
        if not made and not self._stored(manifest):
            raise RetryError("the manifest is gone again", run=self.bucket.url, key=key)

    def _stored(self, manifest: Manifest) -> bool:
        """Whether this very manifest is committed; raises if another one is."""
        found = read_manifest(self.bucket, self.run, manifest.version)
        if found is None:
            return False
        if found.nonce == manifest.nonce:
            return True
        if found.nonce in self._attempts:
            # An earlier attempt of ours, given up for lost, has landed after all. The baseline
            # follows it; these weights were promised another number, so the caller must hear.
            self._adopt(found)
            raise InputError(
                "an earlier attempt at this version was committed late",
                hint="publish again: the weights become the version after it",
                run=self.bucket.url,
                version=manifest.version,
            )
        raise self._fence(manifest.version, "another publisher has committed this version")

    def _fence(self, version: int, what: str) -> FencedError:
        return FencedError(
            what,
            hint="only one trainer may write to a run; this one stops",
            run=self.bucket.url,
            version=version,
        )

    def _settle(self) -> None:
        """Find out what became of a commit that was never answered."""
        if self._uncertain is None:
            return
        step, manifest, sums = self._uncertain
        try:
            landed = with_retries(lambda: self._stored(manifest))
            if landed:
                self._confirm(manifest)
        except FencedError as error:
            self._fenced = error
            raise
        if landed:
            self._advance(step, manifest, sums, 0.0, 0.0)
        self._uncertain = None

    def _adopt(self, found: Manifest) -> None:
        """Move the baseline to a manifest of our own by what it says itself."""
        from deltawire.sync.follow.load import load_mirror

        moved = load_mirror(self.bucket, self.run, at=found.version)
        if moved is None:
            raise CorruptError("a committed version is gone", version=found.version)
        self._baseline = moved
        self._sums = digest_chunks(self._chunks, moved, threads=self._threads)
        self._uncertain = None
        self._attempts.clear()
        self._last_anchor = None


def _check_sums(sums: Mapping[Chunk, Digest], mirror: Mirror, bucket: Bucket) -> None:
    if sum(sums.values(), codec.ZERO) != mirror.digest:
        raise InputError(
            "the mirror does not hold what its digest says",
            hint="load it again",
            run=bucket.url,
            version=mirror.version,
        )
