"""Turns payloads into bits: fetches blobs ahead, decodes pieces on all cores, and verifies both.

Concurrency::

    fetching threads         caller's thread                 decoding threads
      blobs K+1, K+2, … ──▶   pieces of blob K ─────────────▶  decode, digest
      (`AHEAD_BYTES` ahead)   in order, as they finish ◀─────  patch of a piece

At most `AHEAD_BYTES` of blobs are in memory at a time, or two blobs if those are larger, in
addition to what was decoded. Many small blobs, such as those of many ranks, are fetched together.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, islice
from typing import TypeVar

import blake3
import numpy as np

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError
from deltawire.store import REQUESTS, Bucket
from deltawire.store.lanes import in_lane
from deltawire.store.ranges import AT_ONCE, REQUEST_BYTES, range_requests
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.objects import MissingBlobError, get_blob
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.follow.blob_cache import BlobCache
from deltawire.sync.follow.mirror import Mirror, PiecePatch
from deltawire.wire import keys
from deltawire.wire.manifest import CompactedDelta, Manifest
from deltawire.wire.payload import BlobRef, Payload, PayloadRef, Piece
from deltawire.wire.run import Run

T = TypeVar("T")
S = TypeVar("S")

AHEAD_BYTES = 64 << 20
"""The most bytes of blobs in memory, those being decoded included; at least one blob is fetched
while another is decoded."""

WHOLE = 0.9
"""A reader that needs a larger share of a blob than this fetches the whole blob."""


def threads_of(threads: int | None) -> int:
    """Returns the number of coding threads: ``threads``, by default one per core, at most 16."""
    return max(threads or min(os.cpu_count() or 1, 16), 1)


def in_order(
    pool: WorkerThreads, work: Callable[[S], T], items: Iterable[S], *, ahead: int
) -> Iterator[T]:
    """Yields ``work`` of each item in order, computed on the pool, at most ``ahead`` in advance.

    A single item is computed by the caller: starting a thread takes longer than a small one.
    """
    rest = iter(items)
    begun = list(islice(rest, 2))
    if len(begun) == 1:
        yield work(begun[0])
        return
    waiting: list[Future[T]] = []
    try:
        for item in chain(begun, rest):
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    finally:
        for left in waiting:
            left.cancel()


BATCH_ELEMENTS = 1 << 17
"""Elements that a thread codes before it hands over its results, if pieces are smaller."""

BATCH_ITEMS = 128


def in_batches(
    pool: WorkerThreads,
    work: Callable[[S], T],
    items: Iterable[S],
    *,
    elements: Callable[[S], int],
    ahead: int,
) -> Iterator[T]:
    """As `in_order`, but a thread takes several small items at a time.

    Handing over an item costs more than coding a few hundred elements. ``elements`` says how many
    an item has; ``ahead`` counts batches, each of at most `BATCH_ELEMENTS` or one item.
    """

    def batch_work(batch: Sequence[S]) -> list[T]:
        return [work(item) for item in batch]

    for results in in_order(pool, batch_work, batches(items, elements), ahead=ahead):
        yield from results


def batches(items: Iterable[S], elements: Callable[[S], int]) -> Iterator[list[S]]:
    """Yields the items in order, in lists of at most `BATCH_ELEMENTS` elements or one item."""
    batch: list[S] = []
    held = 0
    for item in items:
        size = elements(item)
        if batch and (held + size > BATCH_ELEMENTS or len(batch) == BATCH_ITEMS):
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def wanted_pieces(run: Run, payload: Payload, mirror: Mirror) -> list[Piece]:
    """Returns the pieces whose elements the mirror holds, in their order in the blobs."""
    found = [
        piece
        for piece in payload.pieces
        if mirror.find(run.tensors[piece.tensor].name, piece.start, piece.count) is not None
    ]
    return sorted(found, key=lambda piece: (piece.blob, piece.offset))


def fetch_pieces(
    bucket: Bucket,
    payload: Payload,
    pieces: Sequence[Piece],
    *,
    version: int,
    cache: BlobCache | None = None,
) -> Iterator[list[tuple[Piece, memoryview]]]:
    """Yields the coded bytes of ``pieces``, blob by blob, checked, while later ones are fetched.

    With ``cache``, blobs that other readers of this host need too are fetched once. Raises
    `CorruptError` if a blob is missing or does not match its name.
    """
    by_blob = _by_blob(pieces)

    def cost(number: int) -> tuple[int, int]:
        ref = payload.blobs[number]
        return _cost(ref, by_blob[number]) if cache is None else (ref.bytes, 1)

    def fetch(number: int) -> list[tuple[Piece, memoryview]]:
        with in_lane("bulk"):
            if cache is not None:
                found = _fetch_shared(cache, payload.blobs[number], by_blob[number])
                if found is not None:
                    return found
            return _fetch_blob(bucket, payload, number, by_blob[number], version)

    if len(by_blob) < 2:
        yield from map(fetch, by_blob)
        return
    at_once = 1 if bucket.local else min(REQUESTS, len(by_blob))
    waiting = deque(by_blob) if cache is None else cache.order(list(by_blob))
    ahead: deque[tuple[Future[list[tuple[Piece, memoryview]]], int, int]] = deque()
    held = asked = 0
    pool = WorkerThreads(at_once, thread_name_prefix="fetcher")
    try:
        while waiting or ahead:
            while waiting and len(ahead) < at_once:
                size, requests = cost(waiting[0])
                if ahead and (held + size > AHEAD_BYTES or asked + requests > REQUESTS):
                    break
                ahead.append((pool.submit(fetch, waiting.popleft()), size, requests))
                held, asked = held + size, asked + requests
            found, size, requests = ahead.popleft()
            batch = found.result()
            asked -= requests
            del found
            if waiting and not ahead:
                after, requests = cost(waiting[0])
                ahead.append((pool.submit(fetch, waiting.popleft()), after, requests))
                held, asked = held + after, asked + requests
            yield batch
            # The caller still holds the list. Empty it before the next blob starts, or three blobs
            # would be in memory.
            batch.clear()
            held -= size
    finally:
        pool.shutdown(cancel_futures=True)


def fetched_bytes(payload: Payload, pieces: Iterable[Piece]) -> int:
    """Returns how many bytes of blobs are fetched for ``pieces``, those between them included."""
    return sum(_cost(payload.blobs[number], some)[0] for number, some in _by_blob(pieces).items())


def _by_blob(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    """Groups pieces by the number of their blob, in the order of their first piece."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.blob, []).append(piece)
    return found


def _cost(ref: BlobRef, pieces: Sequence[Piece]) -> tuple[int, int]:
    """Returns how many bytes of a blob are fetched for ``pieces``, and by how many requests at
    once."""
    if _wants_whole(ref, pieces):
        return ref.bytes, min(-(-ref.bytes // REQUEST_BYTES), AT_ONCE)
    requests = range_requests([(piece.offset, piece.length) for piece in pieces])
    return sum(one.length for one in requests), min(len(requests), AT_ONCE)


def _wants_whole(ref: BlobRef, pieces: Sequence[Piece]) -> bool:
    return sum(piece.length for piece in pieces) > WHOLE * ref.bytes


def _fetch_blob(
    bucket: Bucket, payload: Payload, number: int, pieces: list[Piece], version: int
) -> list[tuple[Piece, memoryview]]:
    ref = payload.blobs[number]
    if _wants_whole(ref, pieces):
        blob = memoryview(get_blob(bucket, ref, version=version))
        return [(piece, blob[piece.offset : piece.offset + piece.length]) for piece in pieces]
    key = keys.blob(ref.hash)
    parts = bucket.read_ranges(key, [(piece.offset, piece.length) for piece in pieces])
    if parts is None:
        raise MissingBlobError("a blob is missing", run=bucket.url, version=version, key=key)
    for piece, part in zip(pieces, parts, strict=True):
        if piece_hash(part) != piece.hash:
            raise CorruptError(
                "a piece's bytes do not match its hash", run=bucket.url, version=version, key=key
            )
    return list(zip(pieces, parts, strict=True))


def _fetch_shared(
    cache: BlobCache, ref: BlobRef, pieces: list[Piece]
) -> list[tuple[Piece, memoryview]] | None:
    """Returns the coded bytes of a blob's pieces from the host's cache; None if they cannot be had
    that way. Of a blob that is damaged in the bucket, these pieces may still be whole."""
    try:
        parts = cache.read(ref, [(piece.offset, piece.length) for piece in pieces])
    except CorruptError:
        return None
    if parts is None:
        return None
    found = list(zip(pieces, parts, strict=True))
    if any(piece_hash(part) != piece.hash for piece, part in found):
        cache.drop(ref)
        return None
    return found


def piece_hash(coded: bytes | bytearray | memoryview) -> str:
    """Returns the first half of the BLAKE3 of a piece's bytes, in hexadecimal."""
    return blake3.blake3(coded).hexdigest(16)


def read_for(
    bucket: Bucket, run: Run, step: Manifest | CompactedDelta, ref: PayloadRef, mirror: Mirror
) -> Payload:
    """Reads the payload of ``step``: all of it, or at least the pieces that a partial mirror needs.

    Raises `CorruptError` if its piece table is missing or damaged.
    """
    ranges, whole = {}, True
    for number, spec in enumerate(run.tensors):
        bits, start = mirror.tensors.get(spec.name), mirror.starts.get(spec.name, 0)
        if bits is not None and bits.size:
            ranges[number] = (start, start + bits.size)
        whole = whole and spec.count == (0 if bits is None else bits.size)
    return read_payload(bucket, run, step, ref, None if whole else ranges)


Decoded = dict[tuple[int, int], tuple[PiecePatch, Digest]]
"""Decoded pieces, and what each adds to the digest, by blob and offset."""


class KeptPieces:
    """Keeps decoded pieces of one step, so that a reader whose store stops to answer fetches only
    the rest when it tries again.

    Example::

        kept = KeptPieces()
        decode_delta(bucket, run, step, ref, mirror, kept=kept)  # RetryError
        decode_delta(bucket, run, step, ref, mirror, kept=kept)  # goes on
    """

    def __init__(self) -> None:
        self._step: object = None
        self._pieces: Decoded = {}

    def of(self, step: Manifest | CompactedDelta) -> Decoded:
        """Returns the pieces of ``step`` by blob and offset; forgets those of any other step."""
        if self._step != step:
            self._step, self._pieces = step, {}
        return self._pieces

    def clear(self) -> None:
        """Forgets all pieces."""
        self._step, self._pieces = None, {}


def decode_delta(
    bucket: Bucket,
    run: Run,
    step: Manifest | CompactedDelta,
    ref: PayloadRef,
    mirror: Mirror,
    *,
    threads: int | None = None,
    cache: BlobCache | None = None,
    kept: KeptPieces | None = None,
) -> tuple[list[PiecePatch], Digest]:
    """Returns the patches from the mirror's version to the step's, and the digest of what the
    mirror then holds.

    Changes nothing. ``cache`` is as for `fetch_pieces`. ``kept`` has what an earlier call decoded
    before the store stopped to answer, and gets what this one decodes. Raises `CorruptError` if a
    blob is missing or damaged, or if the result would not match the manifest.
    """
    check_base(bucket, step, mirror)
    payload = read_for(bucket, run, step, ref, mirror)
    count = threads_of(threads)
    shared = cache if cache is not None and cache.takes(ref.bytes) else None
    done = KeptPieces().of(step) if kept is None else kept.of(step)

    def decode(item: tuple[Piece, memoryview]) -> tuple[Piece, PiecePatch, Digest]:
        return item[0], *decode_piece(bucket, run, step.version, mirror, *item)

    with WorkerThreads(count, thread_name_prefix="decoder") as pool:
        pieces = wanted_pieces(run, payload, mirror)
        left = [piece for piece in pieces if (piece.blob, piece.offset) not in done]
        for batch in fetch_pieces(bucket, payload, left, version=step.version, cache=shared):
            for piece, patch, change in in_batches(
                pool, decode, batch, elements=_elements_of, ahead=2 * count
            ):
                done[piece.blob, piece.offset] = patch, change
    held = mirror.held_digest
    for _, change in done.values():
        held += change
    return [patch for patch, _ in done.values() if len(patch.positions)], held


def decode_piece(
    bucket: Bucket, run: Run, version: int, mirror: Mirror, piece: Piece, coded: memoryview
) -> tuple[PiecePatch, Digest]:
    """Decodes one piece of a delta and checks its sum; raises `CorruptError`."""
    name = run.tensors[piece.tensor].name
    base = mirror.find(name, piece.start, piece.count)
    assert base is not None
    patch, change = codec.decode_named(coded, name, base, start=piece.start, threads=1)
    _check_sum(bucket, version, name, piece, change)
    return PiecePatch(name, piece.start, patch.positions.astype(np.uint32), patch.bits), change


def decode_anchor(
    bucket: Bucket,
    run: Run,
    step: Manifest | CompactedDelta,
    payload: Payload,
    mirror: Mirror,
    consume: Callable[[str, int, codec.Bits], None] | None,
    *,
    threads: int | None = None,
) -> Digest:
    """Decodes and checks every piece that the mirror holds; returns the digest of all of them.

    Each is passed to ``consume(name, start, bits)``, or, without it, decoded into the mirror's own
    memory and checked there. Raises `CorruptError`; the mirror may then hold parts of two versions.
    """
    count = threads_of(threads)
    held = codec.ZERO

    def decode(item: tuple[Piece, memoryview]) -> tuple[Piece, codec.Bits, Digest]:
        piece, coded = item
        spec = run.tensors[piece.tensor]
        into = mirror.find(spec.name, piece.start, piece.count) if consume is None else None
        itemsize = codec.ITEMSIZE[spec.dtype]
        bits = codec.decode_full(coded, piece.count, itemsize, threads=1, into=into)
        found = codec.digest_bits(spec.name, bits, piece.start)
        _check_sum(bucket, step.version, spec.name, piece, found)
        return piece, bits, found

    with WorkerThreads(count, thread_name_prefix="decoder") as pool:
        pieces = wanted_pieces(run, payload, mirror)
        for batch in fetch_pieces(bucket, payload, pieces, version=step.version):
            for piece, bits, found in in_batches(
                pool, decode, batch, elements=_elements_of, ahead=count
            ):
                if consume is not None:
                    consume(run.tensors[piece.tensor].name, piece.start, bits)
                held += found
    return held


def _elements_of(item: tuple[Piece, memoryview]) -> int:
    return item[0].count


def check_base(bucket: Bucket, step: Manifest | CompactedDelta, mirror: Mirror) -> None:
    """Raises `CorruptError` unless the step's base is exactly what the mirror holds."""
    if step.base != mirror.version:
        raise CorruptError(
            f"the step builds on version {step.base}, but version {mirror.version} is held",
            run=bucket.url,
            version=step.version,
        )
    if step.base_digest != mirror.digest.hex():
        raise CorruptError(
            f"the step builds on the digest {step.base_digest}, but {mirror.digest.hex()} is held",
            run=bucket.url,
            version=step.version,
        )


def _check_sum(bucket: Bucket, version: int, name: str, piece: Piece, found: Digest) -> None:
    if found.hex() != piece.sum:
        raise CorruptError(
            f"the digest of tensor {name} from element {piece.start} on differs from the manifest",
            run=bucket.url,
            version=version,
        )
