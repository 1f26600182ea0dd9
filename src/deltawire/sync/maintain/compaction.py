"""Folds: deltas over longer strides, made from what is committed, in nobody's way.

A fold of stride s leads from one multiple of s to the next. A reader far behind takes the longest
strides it can, so that it fetches a number of objects that grows with the logarithm of its lag:
with the strides 4, 16 and 64 at most 12 for 60 versions, whatever version it starts from.

A fold is made chunk by chunk: the chunk of the folder's own mirror, which stands at the newest
multiple of the longest stride, is moved to the base and on to the target by the payloads in the
bucket, each held against its sum, and the two are encoded. So it equals step-by-step replay by
construction, and takes the memory of one model and a few blobs. It is dropped if it is not smaller
than what it spans. Folds are not needed by anything: whoever makes them may stop and start at any
time, and two that make the same one do no harm, because it is create-if-absent.
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
from deltawire.sync.chain.objects import check_signer, get_blob, with_retries
from deltawire.sync.chain.payloads import read_payload, store_payload, table_blobs
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.routes import Edge
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Bits, Mirror
from deltawire.sync.maintain.gc_intents import blobs_stay
from deltawire.sync.publish.encoding import BLOB_BYTES, BlobWriter, Chunk, encode_chunk
from deltawire.wire import keys
from deltawire.wire.manifest import CompactedDelta, Manifest, encode_compacted
from deltawire.wire.payload import Payload, Piece, payload_fault, too_many
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer

COMPACTION_STRIDES = (4, 16, 64)

CACHE_BYTES = 256 << 20
"""Blobs are kept up to this many bytes while the chunks that lie in them are folded."""


Sealed = Callable[[int, int], "tuple[bytes, CompactedDelta] | None"]
"""From base and target to a fold and the bytes that it is sealed in, None if there is none."""


class _Blobs:
    """The blobs read last."""

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


class _Way:
    """Steps one behind the other, and their pieces by chunk."""

    def __init__(self, run: Run, survey: RouteFinder, edges: Sequence[Edge], blobs: _Blobs) -> None:
        self._run = run
        self._blobs = blobs
        self._steps: list[
            tuple[Manifest | CompactedDelta, Payload, dict[tuple[int, int], list[Piece]]]
        ] = []
        self.bytes = sum(edge.bytes for edge in edges)
        for edge in edges:
            step, ref = survey.step(edge)
            payload = read_payload(survey.bucket, run, step, ref)
            by_chunk: dict[tuple[int, int], list[Piece]] = {}
            for piece in payload.pieces:
                by_chunk.setdefault((piece.tensor, piece.start // run.chunk), []).append(piece)
            self._steps.append((step, payload, by_chunk))

    def chunks(self) -> list[tuple[int, int]]:
        """The chunks that any step changes, in the order of the table."""
        return sorted({chunk for _, _, by_chunk in self._steps for chunk in by_chunk})

    def move(self, chunk: tuple[int, int], bits: Bits) -> None:
        """Take ``bits``, a chunk of the base, to the target; raises `CorruptError`."""
        name = self._run.tensors[chunk[0]].name
        first = chunk[1] * self._run.chunk
        for step, payload, by_chunk in self._steps:
            for piece in by_chunk.get(chunk, ()):
                part = bits[piece.start - first : piece.end - first]
                coded = self._blobs.coded(payload, piece, step.version)
                patch, change = codec.decode_named(coded, name, part, start=piece.start, threads=1)
                if change.hex() != piece.sum:
                    raise CorruptError("a piece does not add up", version=step.version)
                codec.apply(patch, part)


class Compactor:
    """Makes the folds of a run that are due, from a mirror of its own."""

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
        """``sealed`` gives a fold that somebody who has the key has sealed: then that is what is
        published, once its blobs have been made here."""
        if sealed is None:
            check_signer(bucket, run, signer)
        self.bucket = bucket
        self.run = run
        self.strides = nested(strides)
        self._signer = signer
        self._sealed = sealed
        self._threads = threads
        self._blob_bytes = blob_bytes
        self._mirror: Mirror | None = None
        self._done = -1

    def compact_up_to(self, version: int) -> list[tuple[int, int]]:
        """Make every fold that is due at ``version`` and not there yet; which ones it made.

        Begins at the last multiple of the longest stride when it is first called. Raises
        `RetryError` if the store does not answer, `CorruptError` if what is to be folded is
        damaged or gone; then the same call may be made again.
        """
        if not self.strides or version < self.strides[0]:
            return []
        longest = self.strides[-1]
        if self._mirror is None or self._mirror.version < 0:
            # From its very multiple on, a fold of the longest stride still has to be made there.
            start = max(version - 1, 0) // longest * longest
            self._mirror = load_mirror(
                self.bucket, self.run, at=start, into=self._mirror, threads=self._threads
            )
            self._done = start
        assert self._mirror is not None
        made = []
        for target in range(self._done + 1, version + 1):
            made += [
                (target - stride, target)
                for stride in self.strides
                if target % stride == 0 and self._fold(target - stride, target)
            ]
            if target % longest == 0:
                load_mirror(self.bucket, self.run, at=target, into=self._mirror)
            self._done = target
        return made

    def _fold(self, base: int, target: int) -> bool:
        key = keys.compacted(base, target)
        assert self._mirror is not None
        if self._mirror.version > base or self.bucket.exists(key):
            return False
        sealed = None if self._sealed is None else self._sealed(base, target)
        if self._sealed is not None and sealed is None:
            return False
        blobs = _Blobs(self.bucket)
        to_base = self._way(self._mirror.version, base, blobs)
        onward = self._way(base, target, blobs)
        ends = RouteFinder(self.bucket, self.run, held=None, goal=target)
        first, last = ends.manifest(base), ends.manifest(target)
        if first is None or last is None:
            raise ends.error()
        with BlobWriter(self.bucket, blob_bytes=self._blob_bytes) as writer:
            for place in onward.chunks():
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
            raise BugError(f"a fold went wrong: {fault}", run=self.bucket.url, key=key)
        ref = store_payload(self.bucket, self.run, payload, version=target)
        fold = CompactedDelta(
            run=self.run.id,
            version=target,
            base=base,
            base_digest=first.digest,
            payload=ref,
            digest=last.digest,
            created_at=time.time(),
        )
        if sealed is not None and sealed[1].payload != ref:
            return False  # Another coder made it: its blobs are not these.
        data = sealed[0] if sealed is not None else encode_compacted(fold, signer=self._signer)
        made = with_retries(lambda: self.bucket.create(key, data))
        if blobs_stay(self.bucket, self.run, [*table_blobs([ref]), *payload.blobs]):
            return made
        # Retention has taken them meanwhile. Nobody needs the fold, and it can be made anew.
        with_retries(lambda: self.bucket.delete(key))
        return False

    def _way(self, base: int, target: int, blobs: _Blobs) -> _Way:
        if base == target:
            return _Way(
                self.run, RouteFinder(self.bucket, self.run, held=base, goal=target), (), blobs
            )
        survey = RouteFinder(self.bucket, self.run, held=base, goal=target)
        route = survey.find(anchors=False)
        if route is None:
            raise survey.error()
        return _Way(self.run, survey, route.edges, blobs)

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
    """Strides in order. Raises `InputError` unless each is a multiple of the one before."""
    ordered = tuple(sorted(strides))
    pairs = zip(ordered, ordered[1:] or ordered, strict=False)
    if any(small < 2 or large % small for small, large in pairs):
        raise InputError(
            f"strides {','.join(map(str, ordered))} are not multiples of each other",
            hint="such as 4,16,64",
        )
    return ordered


class CompactionThread:
    """A thread that folds what is due whenever it is woken, beside a publisher or a relay.

    What it fails with is kept in ``error`` and tried again when it is next woken: a fold that is
    missing costs readers bytes and nothing else.
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
        self._folder = Compactor(
            bucket,
            run,
            strides,
            signer=signer,
            sealed=sealed,
            threads=threads,
            blob_bytes=blob_bytes,
        )
        self._version = -1
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def wake(self, version: int) -> None:
        """``version`` is committed: fold what that makes due."""
        if not self._folder.strides:
            return
        with self._wake:
            self._version = version
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="folder", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """Finish what is due and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        done = -1
        while True:
            with self._wake:
                while self._version == done and not self._closing:
                    self._wake.wait()
                if self._version == done:
                    return
                done = self._version
            try:
                self.made += self._folder.compact_up_to(done)
                self.error = None
            except DeltawireError as error:
                self.error = error
            except Exception as error:  # A thread that ends in silence would fold no more.
                self.error = BugError(f"cannot fold: {type(error).__name__}: {error}")
                self.error.__cause__ = error
