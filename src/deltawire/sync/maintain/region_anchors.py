"""Makes a region's anchors from its own deltas, so that whole models do not cross to it.

Concurrency::

    relay                                        thread
      copies version N's delta, commits N ──wake──▶ lists the source's anchors up to N
      copies version N+1's delta, …                 reads one; the mirror takes the region's deltas
                                                    encodes the anchor's blobs ──▶ destination
                                                    creates the anchor, the source's bytes

Encoding is deterministic, so blobs that are encoded here have the names that the source's anchor
states; this is checked before they are stored. A blob whose writer had another encoder is copied,
and so is every missing one if the region's deltas do not lead to the version.

The mirror holds no version until an anchor is due and moves only from anchor to anchor, by the
cheapest route. Copying never waits for it, and a region without anchors has none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from blake3 import blake3

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import BugError, CorruptError, DeltawireError, RetryError
from deltawire.store.traffic import count
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.gc_intents import blobs_stay
from deltawire.sync.chain.objects import (
    check_signed,
    later_anchors,
    missing_blobs,
    put_blob,
    read_manifest,
)
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.follow.fetch import decode_delta, in_order, threads_of
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Mirror, empty_mirror
from deltawire.sync.maintain.blob_copies import BlobCopies
from deltawire.wire import keys
from deltawire.wire.manifest import (
    MAX_MANIFEST_BYTES,
    CompactedDelta,
    Manifest,
    decode_compacted,
)
from deltawire.wire.payload import PayloadRef, Piece
from deltawire.wire.run import Run

WITHIN = 1024
"""Anchors are sought among this many of the newest versions: one that its writer commits later than
that is not made here."""


@dataclass(frozen=True)
class RelayedAnchor:
    """An anchor that was stored at the destination: ``made`` bytes were encoded there, ``copied``
    bytes came from the source because of ``fault``, or because they had another encoder.

    Example::

        for anchor in relay.anchors.take_finished():
            print(anchor.version, anchor.made, anchor.copied)
    """

    version: int
    made: int
    copied: int
    seconds: float
    fault: str = ""


class RegionAnchors:
    """Stores the source's anchors at the destination, in a thread that `wake` starts and that ends
    once there is nothing to do.

    ``error`` is why the last attempt failed, None if it succeeded; the next wake tries again.
    """

    def __init__(
        self, run: Run, copies: BlobCopies, *, unsigned: bool, threads: int | None = None
    ) -> None:
        self.error: DeltawireError | None = None
        self._run = run
        self._copies = copies
        self._source, self._destination = copies.source, copies.destination
        self._unsigned = unsigned
        self._threads = threads
        self._mirror: Mirror | None = None
        self._encoding = threading.Lock()
        """Held by the thread that uses the mirror."""
        self._finished: deque[RelayedAnchor] = deque()
        self._done = -1
        self._condition = threading.Condition()
        self._version = -1
        self._wakes = 0
        self._idle = True
        self._thread: threading.Thread | None = None

    def wake(self, version: int) -> None:
        """Stores the anchors of versions up to ``version``, which the destination has."""
        with self._condition:
            self._version = version
            self._wakes += 1
            self._idle = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="anchors", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def wait(self) -> None:
        """Waits until all anchors up to the last `wake` were tried; raises `RetryError` if a store
        did not answer.
        """
        with self._condition:
            while not self._idle:
                self._condition.wait()
        if isinstance(self.error, RetryError):
            raise self.error

    def take_finished(self) -> list[RelayedAnchor]:
        """Returns the anchors that were stored since the last call."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._finished.popleft())
        return found

    def close(self) -> None:
        """Stores the anchors that are due."""
        with self._condition:
            thread = self._thread
        if thread is not None:
            thread.join()

    def store_stated(self, manifest: Manifest, *, copy: bool) -> RelayedAnchor:
        """Stores the blobs of an anchor that a manifest states, before the manifest is created.

        The blobs of its delta are at the destination; with ``copy``, its base is not.
        """
        assert manifest.anchor is not None
        return self._store(manifest, manifest.anchor, copy=copy or manifest.delta is None)

    def store(self, version: int, *, copy: bool = False) -> RelayedAnchor | None:
        """Stores an anchor that was made later than its version; None if there is none.

        With ``copy`` its blobs are copied: the destination has no version to make it from. Raises
        `CorruptError` if the source's anchor is damaged or of another model, `RetryError` if a
        store does not answer.
        """
        key = keys.compacted(None, version)
        data = self._source.get(key, limit=MAX_MANIFEST_BYTES)
        if data is None:
            return None
        self._copies.count(len(data))
        check_signed(self._source, self._run, data, key)
        stated = decode_compacted(
            data, base=None, version=version, table=self._run, run=self._source.url, key=key
        )
        if not copy:
            manifest = read_manifest(self._destination, self._run, version)
            if manifest is None or manifest.pruned:
                return None
            if manifest.digest != stated.digest:
                raise CorruptError(
                    "an anchor does not have the digest of its version",
                    run=self._source.url,
                    version=version,
                    key=key,
                )
        done = self._store(stated, stated.payload, copy=copy)
        self._destination.create(key, data)
        count("anchors")
        refs = self._copies.blobs_of([stated.payload], version)
        if not blobs_stay(self._destination, self._run, refs, unsigned=self._unsigned):
            self._store(stated, stated.payload, copy=copy)
            if not blobs_stay(self._destination, self._run, refs, unsigned=self._unsigned):
                raise RetryError(
                    "blobs that were just stored are missing again",
                    run=self._destination.url,
                    version=version,
                )
        return done

    def _work(self) -> None:
        seen = 0
        while True:
            with self._condition:
                if self._wakes == seen:
                    self._idle, self._thread = True, None
                    self._condition.notify_all()
                    return
                seen, version = self._wakes, self._version
            self.error = self._store_up_to(version)

    def _store_up_to(self, version: int) -> DeltawireError | None:
        failed: CorruptError | None = None
        try:
            newer_than = max(self._done, version - WITHIN)
            due = [v for v in later_anchors(self._source, newer_than=newer_than) if v <= version]
            there = set(later_anchors(self._destination, newer_than=newer_than)) if due else set()
            if self._done < 0 and there:
                # An earlier relay may have been killed before it checked that one's blobs.
                there.remove(max(there))
            for target in due:
                try:
                    if target not in there and (done := self.store(target)) is not None:
                        self._finished.append(done)
                except CorruptError as error:
                    # The relay's report says so, and the next round makes the anchor.
                    failed = failed or error
                if failed is None:
                    self._done = target
            return failed
        except DeltawireError as error:
            return error
        except BaseException as error:  # A thread that ended silently would never make another.
            found = BugError(f"cannot make an anchor: {type(error).__name__}: {error}")
            found.__cause__ = error
            return found

    def _store(
        self, stated: Manifest | CompactedDelta, ref: PayloadRef, *, copy: bool = False
    ) -> RelayedAnchor:
        started = time.perf_counter()
        version, made, fault = stated.version, 0, ""
        self._copies.blobs(ref, version)
        anchor = read_payload(self._destination, self._run, stated, ref)
        missing = missing_blobs(self._destination, anchor.blobs)
        if missing and not copy:
            with self._encoding:
                try:
                    mirror = self._mirror_at(stated)
                except CorruptError as error:
                    # The blobs are copied from the source instead, each checked by its name.
                    fault = str(error)
                else:
                    by_blob: dict[str, list[Piece]] = {}
                    for piece in anchor.pieces:
                        by_blob.setdefault(anchor.blobs[piece.blob].hash, []).append(piece)
                    for blob in missing:
                        data = self._encode(mirror, by_blob.get(blob.hash, []))
                        if data is not None and blake3(data).hexdigest() == blob.hash:
                            put_blob(self._destination, data)
                            made += len(data)
        copied = self._copies.copy_missing(missing, version)
        return RelayedAnchor(version, made, copied, time.perf_counter() - started, fault)

    def _mirror_at(self, stated: Manifest | CompactedDelta) -> Mirror:
        """Moves the mirror to a version, or to its base and from there by the delta if the version
        is not committed here yet. Raises `CorruptError`.
        """
        bucket, run = self._destination, self._run
        at = stated.base if isinstance(stated, Manifest) else stated.version
        assert at is not None
        into = empty_mirror(run) if self._mirror is None else self._mirror
        if into.version > at:
            into.begin()
        self._mirror = into
        mirror = load_mirror(bucket, run, at=at, into=into, threads=self._threads)
        if isinstance(stated, Manifest):
            assert stated.delta is not None
            pieces, held = decode_delta(
                bucket, run, stated, stated.delta, mirror, threads=self._threads
            )
            mirror.move(pieces, stated.version, Digest.from_hex(stated.digest), held)
        return mirror

    def _encode(self, mirror: Mirror, pieces: list[Piece]) -> bytes | None:
        """Encodes an anchor's blob from the mirror. Returns None if these pieces do not form
        one.
        """

        def encode(piece: Piece) -> bytes:
            spec = self._run.tensors[piece.tensor]
            bits = mirror.find(spec.name, piece.start, piece.count)
            assert bits is not None
            return codec.encode_full(bits, spec.dtype, threads=1)

        ordered = sorted(pieces, key=lambda piece: piece.offset)
        count = threads_of(self._threads)
        parts: list[bytes] = []
        at = 0
        with WorkerThreads(count, thread_name_prefix="encoder") as pool:
            coded = in_order(pool, encode, ordered, ahead=count)
            for piece, part in zip(ordered, coded, strict=True):
                if piece.offset != at or piece.length != len(part):
                    return None
                parts.append(part)
                at += len(part)
        return b"".join(parts)
