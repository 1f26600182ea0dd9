"""Compacts committed deltas over longer strides, in the background.

A compacted delta of stride s leads from one multiple of s to the next. A reader that lags takes the
longest strides it can, so the number of objects that it fetches grows with the logarithm of its
lag: with strides 4, 16 and 64 at most 12 for 60 versions, from any start.

A compacted delta is made chunk by chunk. The compactor's mirror stands at the newest multiple of
the longest stride. The payloads in the bucket, each checked against its sum, move a copy of the
chunk to the base and then to the target, and the difference is encoded. The result equals
step-by-step decoding by construction, and takes the memory of one model and a few blobs. It is
dropped if it is not smaller than the deltas that it spans. Nothing depends on compacted deltas: a
compactor may stop and start at any time, one that cannot be made is left out, and two compactors
may make the same one, because it is created only if absent.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import BugError, CorruptError, DeltawireError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.gc_intents import blobs_stay
from deltawire.sync.chain.objects import check_signer, get_blob
from deltawire.sync.chain.payloads import read_payload, store_payload, table_blobs
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.routes import Edge
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Bits, Mirror
from deltawire.sync.publish import interpreter_exit
from deltawire.sync.publish.encoding import BLOB_BYTES, BlobWriter, Chunk, encode_chunk
from deltawire.wire import keys
from deltawire.wire.manifest import CompactedDelta, Manifest, encode_compacted
from deltawire.wire.payload import Payload, Piece, payload_fault, too_many
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer

COMPACTION_STRIDES = (4, 16, 64)

CACHE_BYTES = 256 << 20
"""Blobs are cached up to this many bytes while the chunks in them are compacted."""


MAX_BACKLOG = 64
"""After a long gap, only this many of the newest longest strides are still compacted."""

Sealed = Callable[[int, int], "tuple[bytes, CompactedDelta] | None"]
"""Maps base and target to the bytes and content of a sealed compacted delta, None if there is
none.
"""


class _BlobCache:
    """Caches the most recently read blobs."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._kept: OrderedDict[str, bytes | bytearray] = OrderedDict()

    def coded(self, payload: Payload, piece: Piece, version: int) -> memoryview:
        ref = payload.blobs[piece.blob]
        blob = self._kept.pop(ref.hash, None)
        if blob is None:
            blob = get_blob(self._bucket, ref, version=version)
        self._kept[ref.hash] = blob
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > CACHE_BYTES:
            self._kept.popitem(last=False)
        return memoryview(blob)[piece.offset : piece.offset + piece.length]


class _Chain:
    """Consecutive steps, and their pieces by chunk."""

    def __init__(
        self, run: Run, finder: RouteFinder, edges: Sequence[Edge], blobs: _BlobCache
    ) -> None:
        self._run = run
        self._blobs = blobs
        self._steps: list[
            tuple[Manifest | CompactedDelta, Payload, dict[tuple[int, int], list[Piece]]]
        ] = []
        self.bytes = sum(edge.bytes for edge in edges)
        for edge in edges:
            step, ref = finder.step(edge)
            payload = read_payload(finder.bucket, run, step, ref)
            by_chunk: dict[tuple[int, int], list[Piece]] = {}
            for piece in payload.pieces:
                by_chunk.setdefault((piece.tensor, piece.start // run.chunk), []).append(piece)
            self._steps.append((step, payload, by_chunk))

    def chunks(self) -> list[tuple[int, int]]:
        """Returns the chunks that any step changes, in the order of the table."""
        return sorted({chunk for _, _, by_chunk in self._steps for chunk in by_chunk})

    def move(self, chunk: tuple[int, int], bits: Bits) -> None:
        """Moves ``bits``, a chunk of the base, to the target; raises `CorruptError`."""
        name = self._run.tensors[chunk[0]].name
        first = chunk[1] * self._run.chunk
        for step, payload, by_chunk in self._steps:
            for piece in by_chunk.get(chunk, ()):
                part = bits[piece.start - first : piece.end - first]
                coded = self._blobs.coded(payload, piece, step.version)
                patch, change = codec.decode_named(coded, name, part, start=piece.start, threads=1)
                if change.hex() != piece.sum:
                    raise CorruptError(
                        "a piece's digest differs from the manifest", version=step.version
                    )
                codec.apply(patch, part)


class Compactor:
    """Makes the compacted deltas of a run that are due, with a separate mirror.

    Example::

        compactor = Compactor(bucket, run, (4, 16, 64), signer=signer)
        compactor.compact_up_to(newest_version(bucket))
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        strides: Sequence[int] = COMPACTION_STRIDES,
        *,
        signer: Signer | None = None,
        sealed: Sealed | None = None,
        threads: int | None = None,
        blob_bytes: int = BLOB_BYTES,
    ) -> None:
        """``sealed`` returns a compacted delta that a holder of the key has sealed; it is published
        once its blobs have been made here.
        """
        if sealed is None:
            check_signer(bucket, run, signer)
        self.bucket = bucket
        self.run = run
        self.strides = nested(strides)
        self.failures: dict[tuple[int, int], CorruptError] = {}
        """Errors of the compacted deltas that could not be made and are left out, by base and
        target.
        """
        self.stopped = threading.Event()
        """Set to leave the rest of the work undone, after the present chunk."""
        self._signer = signer
        self._sealed = sealed
        self._threads = threads
        self._blob_bytes = blob_bytes
        self._mirror: Mirror | None = None
        self._done = -1

    def compact_up_to(self, version: int) -> list[tuple[int, int]]:
        """Makes every missing compacted delta that is due at ``version``. Returns the base and
        target of each.

        The first call begins at the last multiple of the longest stride. A compacted delta over
        damaged or missing objects is left out and recorded in ``failures``: a later one may span
        them. Raises `RetryError` if the store does not answer; the same call may then be repeated.
        """
        if not self.strides:
            return []
        shortest, longest = self.strides[0], self.strides[-1]
        # At a multiple itself, the compacted delta of the longest stride is not made yet.
        begin = max(version - 1, 0) // longest * longest
        if self._done < 0 or begin - self._done > MAX_BACKLOG * longest:
            self._done = begin
        made = []
        for target in range(self._done // shortest * shortest + shortest, version + 1, shortest):
            if self.stopped.is_set():
                break
            made += [
                (target - stride, target)
                for stride in self.strides
                if target % stride == 0 and self._try(target - stride, target)
            ]
            self._done = target
        return made

    def _try(self, base: int, target: int) -> bool:
        try:
            self._move_to(base // self.strides[-1] * self.strides[-1])
            return self._compact(base, target)
        except CorruptError as error:
            self.failures[base, target] = error
            return False

    def _move_to(self, version: int) -> None:
        """Moves the compactor's mirror to a multiple of the longest stride."""
        if self._mirror is None or self._mirror.version != version:
            self._mirror = load_mirror(
                self.bucket, self.run, at=version, into=self._mirror, threads=self._threads
            )

    def _compact(self, base: int, target: int) -> bool:
        key = keys.compacted(base, target)
        assert self._mirror is not None
        if self.bucket.exists(key):
            return False
        sealed = None if self._sealed is None else self._sealed(base, target)
        if self._sealed is not None and sealed is None:
            return False
        blobs = _BlobCache(self.bucket)
        to_base = self._chain(self._mirror.version, base, blobs)
        onward = self._chain(base, target, blobs)
        ends = RouteFinder(self.bucket, self.run, held=None, goal=target)
        first, last = ends.manifest(base), ends.manifest(target)
        if first is None or last is None:
            raise ends.error()
        with BlobWriter(self.bucket, blob_bytes=self._blob_bytes) as writer:
            for place in onward.chunks():
                if self.stopped.is_set():
                    return False
                chunk, old = self._chunk(place)
                to_base.move(place, old)
                new = old.copy()
                onward.move(place, new)
                old_digest: Digest = codec.digest_bits(chunk.name, old, chunk.start)
                coded = encode_chunk(self.run, chunk, old, new, old_digest)
                if coded.payload is not None:
                    writer.add(chunk, coded.payload, coded.change)
                if writer.bytes > onward.bytes:
                    return False
            payload = writer.finish()
        if payload.bytes >= max(onward.bytes, 1) or too_many(payload):
            return False
        fault = payload_fault(payload, self.run, base_digest=first.digest, to=last.digest)
        if fault:
            raise BugError(
                f"the new compacted delta is wrong: {fault}", run=self.bucket.url, key=key
            )
        ref = store_payload(self.bucket, self.run, payload, version=target)
        compacted = CompactedDelta(
            run=self.run.id,
            version=target,
            base=base,
            base_digest=first.digest,
            payload=ref,
            digest=last.digest,
            created_at=time.time(),
        )
        if sealed is not None and sealed[1].payload != ref:
            return False  # Another encoder made it, whose blobs differ from these.
        data = sealed[0] if sealed is not None else encode_compacted(compacted, signer=self._signer)
        made = self.bucket.create(key, data)
        needed = [*table_blobs([ref]), *payload.blobs]
        if blobs_stay(self.bucket, self.run, needed, unsigned=self._sealed is not None):
            return made
        # Retention deleted them meanwhile. No reader depends on this object, and it can be made
        # again.
        self.bucket.delete(key)
        return False

    def _chain(self, base: int, target: int, blobs: _BlobCache) -> _Chain:
        if base == target:
            return _Chain(
                self.run, RouteFinder(self.bucket, self.run, held=base, goal=target), (), blobs
            )
        finder = RouteFinder(self.bucket, self.run, held=base, goal=target)
        route = finder.find(anchors=False)
        if route is None:
            raise finder.error()
        return _Chain(self.run, finder, route.edges, blobs)

    def _chunk(self, place: tuple[int, int]) -> tuple[Chunk, Bits]:
        assert self._mirror is not None
        number, index = place
        spec = self.run.tensors[number]
        start = index * self.run.chunk
        count = min(self.run.chunk, spec.count - start)
        bits = self._mirror.find(spec.name, start, count)
        assert bits is not None
        return Chunk(number, spec.name, start, count), bits.copy()


def nested(strides: Sequence[int]) -> tuple[int, ...]:
    """Returns strides in order; raises `InputError` unless each is a multiple of the one before."""
    ordered = tuple(sorted(strides))
    pairs = zip(ordered, ordered[1:] or ordered, strict=False)
    if any(small < 2 or large % small for small, large in pairs):
        raise InputError(
            f"strides {','.join(map(str, ordered))} are not multiples of each other",
            hint="give strides such as 4,16,64",
        )
    return ordered


class CompactionThread:
    """A thread of a publisher or a relay that makes the compacted deltas due at each wake.

    ``error`` is why the last attempt failed or left one out, None if it succeeded. The next wake
    tries again; until then a missing compacted delta costs readers only bytes.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        strides: Sequence[int],
        *,
        signer: Signer | None = None,
        sealed: Sealed | None = None,
        threads: int | None = None,
        blob_bytes: int = BLOB_BYTES,
    ) -> None:
        self.error: DeltawireError | None = None
        self.made: list[tuple[int, int]] = []
        self._compactor = Compactor(
            bucket,
            run,
            strides,
            signer=signer,
            sealed=sealed,
            threads=threads,
            blob_bytes=blob_bytes,
        )
        self._version = self._first = -1
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def wake(self, version: int) -> None:
        """Makes the compacted deltas that the commit of ``version`` makes due."""
        if not self._compactor.strides:
            return
        with self._wake:
            self._version = version
            self._first = version if self._first < 0 else self._first
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="compactor", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # The interpreter ends.
                    return
                self._thread = thread
                interpreter_exit.works(self)
            self._wake.notify()

    def close(self) -> None:
        """Finishes the compactions that are due and ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def stop(self, limit_s: float) -> None:
        """Ends the thread after its present chunk or request; waits at most ``limit_s`` for it."""
        self._compactor.stopped.set()
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(limit_s)

    def _run(self) -> None:
        done = -1
        while True:
            with self._wake:
                while self._version == done and not self._closing:
                    self._wake.wait()
                if self._version == done:
                    return
                # The first call says where compaction begins, however many versions came since.
                done = self._first if done < 0 else self._version
            self.error = self._compact(done)

    def _compact(self, version: int) -> DeltawireError | None:
        try:
            self._compactor.failures.clear()
            self.made += self._compactor.compact_up_to(version)
            return next(iter(self._compactor.failures.values()), None)
        except DeltawireError as error:
            return error
        except BaseException as error:  # A thread that ended silently would never compact again.
            found = BugError(f"cannot compact: {type(error).__name__}: {error}")
            found.__cause__ = error
            return found
