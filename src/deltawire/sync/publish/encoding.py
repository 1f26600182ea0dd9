"""Encodes chunks of weights on all cores and uploads the payloads in blobs of a stated size.

Concurrency::

    encoding threads           the calling thread              uploading threads
      digest and encode ──────▶ pieces in order, gathered ────▶ put blob K
      a chunk                   until a blob is full            put blob K+1
                                └ waits while uploads hold
                                  UPLOAD_BYTES, or UPLOADS run

A delta of any size therefore occupies at most `UPLOAD_BYTES`, two blobs and one chunk per thread in
memory. Small blobs, such as those of one rank of many, go up many at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import RetryError
from deltawire.store import Bucket, ObjectMeta
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.evidence import READS
from deltawire.sync.chain.gc_intents import blobs_stay
from deltawire.sync.chain.objects import put_blob
from deltawire.sync.follow.fetch import (
    batches,
    in_batches,
    in_order,
    piece_hash,
    threads_of,
)
from deltawire.sync.follow.mirror import Bits, Mirror
from deltawire.wire.payload import BlobRef, Payload, Piece
from deltawire.wire.run import Run

BLOB_BYTES = 32 << 20
"""A blob is closed when it holds this many bytes; it exceeds them by less than one chunk."""

UPLOADS = 16
"""The most uploads at once."""

UPLOAD_BYTES = 64 << 20
"""The most bytes of blobs that are being uploaded at once, except for one blob that is larger."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of a tensor whose borders no piece crosses: one chunk of the grid, or the part of it
    that is held.
    """

    tensor: int
    name: str
    start: int
    count: int


def chunks_of(run: Run, mirror: Mirror) -> list[Chunk]:
    """Lists the chunks of everything a mirror holds, in the order of the run's tensor table."""
    found = []
    for number, spec in enumerate(run.tensors):
        bits = mirror.tensors.get(spec.name)
        first = mirror.starts.get(spec.name, 0)
        at, stop = first, first + (0 if bits is None else bits.size)
        while at < stop:
            end = min((at // run.chunk + 1) * run.chunk, stop)
            found.append(Chunk(number, spec.name, at, end - at))
            at = end
    return found


def bits_at(mirror: Mirror, chunk: Chunk) -> Bits:
    """Returns the memory of a chunk that the mirror holds."""
    bits = mirror.find(chunk.name, chunk.start, chunk.count)
    assert bits is not None
    return bits


class EncodedChunk(NamedTuple):
    """An encoded chunk; ``payload`` is None if no element changed."""

    chunk: Chunk
    payload: bytes | None
    change: Digest
    digest: Digest
    changed: int


class BlobWriter:
    """Gathers payloads into blobs and uploads them in the background; use it as a context."""

    def __init__(self, bucket: Bucket, *, blob_bytes: int = BLOB_BYTES) -> None:
        self._bucket = bucket
        self._blob_bytes = blob_bytes
        self._pool = WorkerThreads(UPLOADS, thread_name_prefix="uploader")
        self._uploads: list[Future[BlobRef]] = []
        self._running: deque[tuple[Future[BlobRef], int]] = deque()
        self._parts: list[bytes] = []
        self._size = 0
        self._pieces: list[Piece] = []
        self.bytes = 0
        """The number of bytes added so far."""

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, chunk: Chunk, payload: bytes, total: Digest) -> None:
        """Appends a piece; ``total`` is what it adds to the digest.

        Raises the error of an earlier upload that failed.
        """
        place = (len(self._uploads), self._size, len(payload))
        self._pieces.append(
            Piece(chunk.tensor, chunk.start, chunk.count, *place, total.hex(), piece_hash(payload))
        )
        self._parts.append(payload)
        self._size += len(payload)
        self.bytes += len(payload)
        if self._size >= self._blob_bytes:
            self.close_blob()

    def finish(self) -> Payload:
        """Waits for all uploads and returns the payload; raises the error of one that failed."""
        self.close_blob()
        refs = [upload.result() for upload in self._uploads]
        return Payload(blobs=refs, pieces=self._pieces)

    def close_blob(self) -> None:
        """Ends the blob under way, if it has any bytes: the next piece begins another."""
        if not self._parts:
            return
        self._make_room(self._size)
        data, self._parts, self._size = b"".join(self._parts), [], 0
        upload = self._pool.submit(put_blob, self._bucket, data)
        self._uploads.append(upload)
        self._running.append((upload, len(data)))

    def _make_room(self, size: int) -> None:
        """Waits until another ``size`` bytes may be uploaded; raises the error of an upload."""
        while self._running and (
            len(self._running) >= UPLOADS
            or size + sum(held for _, held in self._running) > UPLOAD_BYTES
        ):
            self._running.popleft()[0].result()


def upload_delta(
    bucket: Bucket,
    run: Run,
    chunks: Sequence[Chunk],
    base: Mirror,
    target: Mirror,
    sums: Mapping[Chunk, Digest],
    *,
    threads: int | None = None,
    blob_bytes: int = BLOB_BYTES,
) -> tuple[Payload, dict[Chunk, Digest], int]:
    """Encodes and uploads the difference from ``base`` to ``target``.

    ``sums`` holds the base's digests by chunk; the target's are returned with the payload, and
    the number of elements that changed.
    """
    moved, changed = dict(sums), 0
    with BlobWriter(bucket, blob_bytes=blob_bytes) as writer:
        for coded in encode_deltas(chunks, run, base, target, sums, threads=threads):
            if coded.payload is not None:
                writer.add(coded.chunk, coded.payload, coded.change)
                moved[coded.chunk] = coded.digest
                changed += coded.changed
        return writer.finish(), moved, changed


def keep_blobs(
    bucket: Bucket,
    run: Run,
    refs: Sequence[BlobRef],
    again: Callable[[], None],
    *,
    listed: Sequence[ObjectMeta] | None = None,
) -> None:
    """Ensures that the blobs ``refs``, which a manifest just committed, stay in the bucket.

    If retention took one (see `gc_intents`), ``again`` encodes and uploads them once more, under
    the same names: encoding is deterministic. ``listed`` has the intents that were listed after the
    commit (see `blobs_stay`). Raises `RetryError` if the store does not answer.
    """
    if blobs_stay(bucket, run, refs, listed=listed):
        return
    for _ in range(READS - 1):  # One wrong answer to the second look must not end all ranks.
        again()
        if blobs_stay(bucket, run, refs):
            return
    raise RetryError("blobs that were just uploaded are missing again", run=bucket.url)


def encode_deltas(
    chunks: Iterable[Chunk],
    run: Run,
    base: Mirror,
    target: Mirror,
    sums: Mapping[Chunk, Digest],
    *,
    threads: int | None = None,
) -> Iterator[EncodedChunk]:
    """Encodes each chunk's change from ``base`` to ``target``; ``sums`` are the base's digests.

    Small chunks are encoded many at a time, each batch in one native call.
    """
    count = threads_of(threads)

    def encode(batch: Sequence[Chunk]) -> list[EncodedChunk]:
        if len(batch) > 1:
            return _encode_batch(run, batch, base, target, sums)
        (chunk,) = batch
        return [encode_chunk(run, chunk, bits_at(base, chunk), bits_at(target, chunk), sums[chunk])]

    with WorkerThreads(count, thread_name_prefix="encoder") as pool:
        for coded in in_order(pool, encode, batches(chunks, _elements_of), ahead=2 * count):
            yield from coded


def _encode_batch(
    run: Run,
    chunks: Sequence[Chunk],
    base: Mirror,
    target: Mirror,
    sums: Mapping[Chunk, Digest],
) -> list[EncodedChunk]:
    """Encodes the changes of chunks, those of one dtype together; the result is in their order."""
    by_dtype: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_dtype.setdefault(run.tensors[chunk.tensor].dtype, []).append(chunk)
    found: dict[Chunk, EncodedChunk] = {}
    for dtype, alike in by_dtype.items():
        changes = [
            codec.ChangedRange(
                chunk.name,
                bits_at(base, chunk),
                bits_at(target, chunk),
                chunk.start,
                run.tensors[chunk.tensor].columns,
            )
            for chunk in alike
        ]
        for chunk, coded in zip(alike, codec.encode_batch(changes, dtype=dtype), strict=True):
            found[chunk] = _encoded(chunk, coded, sums[chunk])
    return [found[chunk] for chunk in chunks]


def encode_chunk(run: Run, chunk: Chunk, old: Bits, new: Bits, old_digest: Digest) -> EncodedChunk:
    """Encodes the change of one chunk from the bits ``old`` to ``new``."""
    spec = run.tensors[chunk.tensor]
    coded = codec.encode_named(
        chunk.name,
        old,
        new,
        start=chunk.start,
        dtype=spec.dtype,
        columns=spec.columns,
        threads=1,
    )
    return _encoded(chunk, coded, old_digest)


def _encoded(chunk: Chunk, coded: codec.Delta, old_digest: Digest) -> EncodedChunk:
    payload = coded.payload if coded.changed else None
    return EncodedChunk(chunk, payload, coded.moved, old_digest + coded.moved, coded.changed)


def encode_anchors(
    chunks: Iterable[Chunk], run: Run, target: Mirror, *, threads: int | None = None
) -> Iterator[EncodedChunk]:
    """Encodes every chunk of ``target`` whole; ``change`` is the chunk's digest."""
    count = threads_of(threads)

    def encode(chunk: Chunk) -> EncodedChunk:
        bits = bits_at(target, chunk)
        digest = codec.digest_bits(chunk.name, bits, chunk.start)
        payload = codec.encode_full(bits, run.tensors[chunk.tensor].dtype, threads=1)
        return EncodedChunk(chunk, payload, digest, digest, chunk.count)

    with WorkerThreads(count, thread_name_prefix="encoder") as pool:
        yield from in_batches(pool, encode, chunks, elements=_elements_of, ahead=count)


def digest_chunks(
    chunks: Iterable[Chunk], mirror: Mirror, *, threads: int | None = None
) -> dict[Chunk, Digest]:
    """Computes the digest of every chunk of a mirror."""

    def one(chunk: Chunk) -> tuple[Chunk, Digest]:
        return chunk, codec.digest_bits(chunk.name, bits_at(mirror, chunk), chunk.start)

    count = threads_of(threads)
    with WorkerThreads(count, thread_name_prefix="digester") as pool:
        return dict(in_batches(pool, one, chunks, elements=_elements_of, ahead=4 * count))


def _elements_of(chunk: Chunk) -> int:
    return chunk.count
