"""Keeps another region's bucket current: each delta crosses once, a full model at most once.

Concurrency::

    source                      relay                                destination
      manifest N+1 ───────────▶ (its bytes, unchanged)
      blobs of the delta ─────▶ each once ─────────────────────────▶ blobs
                                the mirror takes the delta, and
                                encodes the anchor's blobs again ──▶ blobs
                                                       last of all ▶ manifest N+1, the same bytes

Manifests are copied byte for byte, so their signatures hold at the destination as well; the relay
has no key and needs none. An anchor's blobs are encoded from the relay's own mirror. Encoding is
deterministic, so they have the names that the manifest states, which is checked before they are
stored. A blob that differs, because its writer had another encoder, is copied; this is counted and
reported.

The relay keeps all its state in the destination. After a stop at any point, it finds the newest
version there and continues; blobs of an uncommitted version are stored again or found. Compacted
deltas are made at the destination, from its own deltas; in a signed run, where they need the key,
the source's are copied once their blobs have been made.

Versions that retention prunes at the source are pruned at the destination too, down to the newest
anchor that is there, with the source's tombstones. A region's bucket therefore does not grow
without bound. A manifest that the source lost, or that cannot be read there, is skipped once a
newer version can be read, and remains the relay's ``alarm``.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from blake3 import blake3

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.store import REQUESTS, Bucket, RetryingBucket, in_parallel
from deltawire.sync.chain.gc_intents import blobs_stay
from deltawire.sync.chain.objects import (
    check_signed,
    committed_versions,
    files_of,
    get_blob,
    newest_retention_floor,
    newest_version,
    put_blob,
    read_manifest,
    read_run,
    require_run,
)
from deltawire.sync.chain.payloads import read_blobs, read_payload, table_blobs
from deltawire.sync.chain.version_poller import VersionPoller, newest_readable
from deltawire.sync.follow.fetch import decode_delta, in_order, threads_of
from deltawire.sync.follow.load import fetch_anchor, load_mirror
from deltawire.sync.follow.mirror import Mirror, empty_mirror
from deltawire.sync.maintain.retention import GRACE_S, Pruned, SealedElsewhere, prune
from deltawire.sync.publish.compaction import COMPACTION_STRIDES, CompactionThread
from deltawire.wire import keys
from deltawire.wire.coordination import MAX_FLOOR_BYTES, RetentionFloor
from deltawire.wire.manifest import (
    MAX_MANIFEST_BYTES,
    CompactedDelta,
    Manifest,
    decode_compacted,
    decode_manifest,
)
from deltawire.wire.payload import BlobRef, PayloadRef, Piece
from deltawire.wire.run import MAX_RUN_BYTES, Run
from deltawire.wire.seal import Signer, seal

PRUNE_EVERY_S = 300.0
"""Seconds between checks of what the source has pruned, while it has no new version."""

COPIED_BYTES = 256 << 20
"""The most bytes of blobs that are copied at once, except for one blob that is larger."""

PATIENCE = 16
"""After this many further versions, a compacted delta that is missing at the source of a signed run
is given up.
"""


@dataclass(frozen=True)
class Relayed:
    """The cost of copying one version. ``crossed`` bytes came from the source, of which
    ``anchor_copied`` for an anchor; ``anchor_made`` bytes were encoded here instead. ``alarm``
    names a manifest at the source that could not be read, ``compaction_error`` explains why a
    compacted delta could not be made.

    Example::

        for done in relay.follow():
            print(done.version, done.crossed, done.seconds)
    """

    version: int
    pruned: bool
    crossed: int
    anchor_made: int
    anchor_copied: int
    seconds: float
    alarm: str = ""
    compaction_error: str = ""


class Relay:
    """Copies a run from one bucket to another, version by version.

    With an empty destination, copying begins with the newest anchor at or before ``start`` (None:
    the newest of all). ``strides`` are those of the compacted deltas made at the destination; in a
    signed run without ``signer``, only those that the source has too. Unless ``retain`` is false,
    versions that the source has pruned are pruned at the destination, ``grace_s`` after they were
    closed there, whenever everything at the source has been copied. Not for use by several threads
    at once; two relays to one destination are harmless.

    Example::

        relay = Relay(open_bucket("s3://here/run"), open_bucket("gs://there/run"))
        for done in relay.follow():
            print(done.version, done.crossed)
    """

    def __init__(
        self,
        source: Bucket,
        destination: Bucket,
        *,
        public_key: str = "",
        start: int | None = None,
        strides: tuple[int, ...] = COMPACTION_STRIDES,
        signer: Signer | None = None,
        threads: int | None = None,
        retain: bool = True,
        grace_s: float = GRACE_S,
    ) -> None:
        """Raises `InputError` if there is no run at the source, or another one at the destination,
        `CorruptError` if the destination's newest version cannot be read there."""
        if source is destination or _same_place(source.url, destination.url):
            raise InputError(
                "source and destination are the same bucket",
                hint="choose another destination",
                run=source.url,
            )
        self.source = RetryingBucket.over(source)
        self.destination = RetryingBucket.over(destination)
        self._threads = threads
        self._counting = threading.Lock()
        self.crossed = 0
        """Bytes of manifests, blobs and run.json that this object has read from the source."""
        self._retain = retain
        self._grace_s = grace_s
        self._prune_at = 0.0
        self._pruned_below = 0
        self._data: dict[int, bytes] = {}
        self.run = self._copy_run(public_key)
        self._keyless = bool(self.run.public_key) and signer is None
        self._poller = VersionPoller(self.source, self.run, read=self._read)
        self.mirror, self._done = self._resume()
        if self._done < 0:
            first = self._first(start)
            self._done = first - 1
            if first:
                self._begin_with(first)
        self.compaction = CompactionThread(
            self.destination,
            self.run,
            strides,
            signer=signer,
            sealed=self._sealed_at_source if self._keyless else None,
            threads=threads,
        )

    @property
    def version(self) -> int:
        """The newest version that can be read at the destination, -1 before the first."""
        return self.mirror.version

    @property
    def alarm(self) -> CorruptError | None:
        """The reason why a manifest at the source could not be read, None if all could."""
        return self._poller.alarm

    def advance(self, progress: Callable[[Relayed], None] | None = None) -> int:
        """Copies every version that is now at the source. Returns how many there were."""
        count = 0
        while (done := self.step()) is not None:
            count += 1
            if progress is not None:
                progress(done)
        self.prune()
        return count

    def follow(self, *, stop: threading.Event | None = None) -> Iterator[Relayed]:
        """Copies version after version, waiting for the next, until ``stop`` is set."""
        stop = stop or threading.Event()
        while not stop.is_set():
            done = self.step()
            if done is None:
                if time.monotonic() > self._prune_at:
                    self._prune_at = time.monotonic() + PRUNE_EVERY_S
                    self.prune()
                stop.wait(self._poller.pause_s)
                continue
            yield done

    def prune(self) -> Pruned | None:
        """Prunes at the destination what the source has pruned. Returns None if there was nothing
        to prune.

        Raises as `retention.prune`; the same call may then be repeated.
        """
        floor = newest_retention_floor(self.source, self.run) if self._retain else 0
        if not self._pruned_below < floor <= self.mirror.version:
            return None
        found = prune(
            self.destination,
            self.run,
            cutoff=floor,
            grace_s=self._grace_s,
            sealed=SealedElsewhere(self._tombstone, self._floor),
        )
        if found.pruned_below == found.floor:
            self._pruned_below = floor  # Nothing to do until the source prunes more.
        return found

    def close(self) -> None:
        """Makes the compacted deltas that are due, and ends the compaction thread."""
        self.compaction.close()

    def step(self) -> Relayed | None:
        """Copies the next version; None if there is none at the source yet.

        Raises `CorruptError` if the source lost or damaged its blobs, or the destination holds
        another version of that number, `RetryError` if one of the stores does not answer; the same
        call may then be repeated.
        """
        started, crossed = time.perf_counter(), self.crossed
        found = self._next()
        if found is None:
            return None
        data, manifest = found
        version = manifest.version
        made = copied = 0
        if not manifest.pruned:
            self._copy_files(manifest)
            if manifest.delta is not None:
                self._copy_refs(self._blobs(manifest.delta, version), version)
            made, copied = self._move(manifest)
        self._commit(manifest, data)
        if not manifest.pruned:
            self._keep_blobs(manifest)
        self._done = version
        if self.mirror.version == version:
            self.compaction.wake(version)
        return Relayed(
            version,
            manifest.pruned,
            self.crossed - crossed,
            made,
            copied,
            time.perf_counter() - started,
            alarm="" if self.alarm is None else str(self.alarm),
            compaction_error=self._compaction_error(),
        )

    def _compaction_error(self) -> str:
        error = self.compaction.error  # A delta that the source has not made yet is not an error.
        return "" if error is None or isinstance(error, RetryError) else str(error)

    def _next(self) -> tuple[bytes, Manifest] | None:
        """Returns the next version at the source that can be read, None if there is none yet."""
        self._data.clear()
        newest = self._poller.newer(self._done, nearest=True)
        if newest is None:
            return None
        if newest.version == self._done + 1:
            return self._data[newest.version], newest
        # The next one is pruned, lost or damaged; use the first later one that can be read.
        for version in committed_versions(self.source, newer_than=self._done):
            try:
                manifest = self._read(version)
            except CorruptError:
                continue
            if manifest is not None:
                return self._data[version], manifest
        return None

    def _tombstone(self, version: int) -> bytes | None:
        found = self._read(version)
        return self._data.pop(version) if found is not None and found.pruned else None

    def _floor(self, version: int) -> bytes | None:
        key = keys.retention_floor(version)
        data = self.source.get(key, limit=MAX_FLOOR_BYTES)
        if data is not None:
            check_signed(self.source, self.run, data, key)
        return data

    def _begin_with(self, version: int) -> None:
        """Records at the destination that it never held a version below ``version``."""
        key = keys.retention_floor(version)
        data = seal(RetentionFloor(run=self.run.id, version=version), key=key)
        self.destination.create(key, data)

    def _copy_run(self, public_key: str) -> Run:
        """Copies run.json unchanged, after its files."""
        run = require_run(self.source, public_key=public_key)
        there = read_run(self.destination, public_key=public_key)
        if there is not None and there.id != run.id:
            raise InputError(
                "the destination holds another run",
                hint="choose an empty destination",
                run=self.destination.url,
            )
        if there is None:
            data = self.source.get(keys.RUN, limit=MAX_RUN_BYTES)
            if data is None:
                raise RetryError(
                    "run.json existed and is now missing", run=self.source.url, key=keys.RUN
                )
            check_signed(self.source, run, data, keys.RUN)
            self.crossed += len(data)
            self._copy_refs([BlobRef(file.blob, file.bytes) for file in run.model_files])
            self.destination.create(keys.RUN, data)
        return run

    def _resume(self) -> tuple[Mirror, int]:
        """Loads the newest version at the destination. Returns the mirror, and the newest version
        that was copied (-1: none).
        """
        newest = newest_readable(self.destination, self.run)
        if newest is None:
            copied = newest_version(self.destination)
            return empty_mirror(self.run), -1 if copied is None else copied
        try:
            mirror = load_mirror(
                self.destination, self.run, at=newest.version, threads=self._threads
            )
        except CorruptError:
            # An earlier relay may have been killed before it checked its blobs.
            for ref in newest.payloads:
                self._copy_refs(self._blobs(ref, newest.version), newest.version)
            mirror = load_mirror(
                self.destination, self.run, at=newest.version, threads=self._threads
            )
        assert mirror is not None
        return mirror, newest.version

    def _sealed_at_source(self, base: int, target: int) -> tuple[bytes, CompactedDelta] | None:
        """Returns the source's compacted delta, whose signature is valid at the destination too;
        None if there is none. It may appear shortly after its version, so it is awaited until it is
        long overdue.
        """
        key = keys.compacted(base, target)
        data = self.source.get(key, limit=MAX_MANIFEST_BYTES)
        if data is None:
            if self._done + 1 - target <= PATIENCE:
                raise RetryError(
                    "the compacted delta is not at the source yet", run=self.source.url, key=key
                )
            return None
        self.crossed += len(data)
        check_signed(self.source, self.run, data, key)
        table, url = self.run, self.source.url
        return data, decode_compacted(
            data, base=base, version=target, table=table, run=url, key=key
        )

    def _first(self, start: int | None) -> int:
        newest = newest_readable(self.source, self.run)
        if newest is None:
            return 0
        for version in sorted(committed_versions(self.source), reverse=True):
            if version > (newest.version if start is None else min(start, newest.version)):
                continue
            try:
                found = read_manifest(self.source, self.run, version)
            except CorruptError:
                continue
            if found is not None and found.anchor is not None:
                return version
        if start is not None and start < newest.version:
            raise InputError(
                f"the source has no anchor at or before version {start}",
                hint="start with a newer version, or with the newest",
                run=self.source.url,
            )
        raise CorruptError("the source has no anchor", run=self.source.url)

    def _read(self, version: int) -> Manifest | None:
        """Reads a manifest at the source, and keeps its bytes in ``_data``."""
        key = keys.manifest(version)
        data = self.source.get(key, limit=MAX_MANIFEST_BYTES)
        if data is None:
            return None
        check_signed(self.source, self.run, data, key)
        manifest = decode_manifest(
            data, version=version, table=self.run, run=self.source.url, key=key
        )
        self.crossed += len(data)
        self._data[version] = data
        return manifest

    def _copy_files(self, manifest: Manifest) -> None:
        self._copy_refs([BlobRef(f.blob, f.bytes) for f in files_of(self.run, manifest)])

    def _blobs(self, ref: PayloadRef, version: int) -> list[BlobRef]:
        """Returns the blobs of a payload, by its piece table, which is copied first."""
        tables = table_blobs([ref])
        self._copy_refs(tables, version)
        try:
            return read_blobs(self.destination, self.run, ref)
        except CorruptError:
            # Only the size of an existing table was checked: copy it again.
            for table in tables:
                self._copy_blob(table, version)
            return read_blobs(self.destination, self.run, ref)

    def _copy_refs(self, refs: list[BlobRef], version: int | None = None) -> None:
        """Copies the blobs that the destination lacks, each checked against its name."""

        def copy(ref: BlobRef) -> None:
            if self.destination.size(keys.blob(ref.hash)) != ref.bytes:
                self._copy_blob(ref, version)

        largest = max((ref.bytes for ref in refs), default=0)
        far = self.destination if self.source.local else self.source
        in_parallel(far, copy, refs, at_once=copies_at_once(largest))

    def _copy_blob(self, ref: BlobRef, version: int | None) -> None:
        data = get_blob(self.source, ref, version=version)
        with self._counting:
            self.crossed += len(data)
        put_blob(self.destination, bytes(data))

    def _move(self, manifest: Manifest) -> tuple[int, int]:
        """Moves the mirror to the version and stores its anchor's blobs at the destination, encoded
        here if the mirror arrived by the delta, otherwise copied. Returns the bytes encoded and
        copied.
        """
        follows = manifest.delta is not None and manifest.base == self.mirror.version
        if follows:
            assert manifest.delta is not None
            try:
                self._apply_delta(manifest, manifest.delta)
            except CorruptError:
                # Only the size of existing blobs was checked: copy them again.
                tables = table_blobs([manifest.delta])
                for ref in [*tables, *self._blobs(manifest.delta, manifest.version)]:
                    self._copy_blob(ref, manifest.version)
                self._apply_delta(manifest, manifest.delta)
        if manifest.anchor is None:
            return 0, 0
        if follows:
            return self._make_anchor(manifest, manifest.anchor)
        before = self.crossed
        self._copy_refs(self._blobs(manifest.anchor, manifest.version), manifest.version)
        fetch_anchor(
            self.destination, self.run, manifest, manifest.anchor, self.mirror,
            threads=self._threads,
        )  # fmt: skip
        return 0, self.crossed - before

    def _keep_blobs(self, manifest: Manifest) -> None:
        """Copies or encodes blobs again that retention at the destination deleted before the
        commit: the relay had found them there, but perhaps no object referred to them.
        """
        refs = table_blobs(manifest.payloads)
        for payload in manifest.payloads:
            refs += self._blobs(payload, manifest.version)
        refs += [BlobRef(file.blob, file.bytes) for file in files_of(self.run, manifest)]
        if blobs_stay(self.destination, self.run, refs, unsigned=self._keyless):
            return
        if manifest.anchor is not None and self.mirror.version == manifest.version:
            self._make_anchor(manifest, manifest.anchor)
        self._copy_refs(refs, manifest.version)
        if not blobs_stay(self.destination, self.run, refs, unsigned=self._keyless):
            raise RetryError(
                "blobs that were just stored are missing again",
                run=self.destination.url,
                version=manifest.version,
            )

    def _apply_delta(self, manifest: Manifest, payload: PayloadRef) -> None:
        pieces, held = decode_delta(
            self.destination, self.run, manifest, payload, self.mirror, threads=self._threads
        )
        self.mirror.move(pieces, manifest.version, Digest.from_hex(manifest.digest), held)

    def _make_anchor(self, manifest: Manifest, stated: PayloadRef) -> tuple[int, int]:
        made = copied = 0
        self._blobs(stated, manifest.version)
        anchor = read_payload(self.destination, self.run, manifest, stated)
        pieces: dict[int, list[Piece]] = {}
        for piece in anchor.pieces:
            pieces.setdefault(piece.blob, []).append(piece)
        for number, ref in enumerate(anchor.blobs):
            if self.destination.size(keys.blob(ref.hash)) == ref.bytes:
                continue
            data = self._encode(pieces.get(number, []))
            if data is not None and blake3(data).hexdigest() == ref.hash:
                put_blob(self.destination, data)
                made += len(data)
            else:
                self._copy_blob(ref, manifest.version)
                copied += ref.bytes
        return made, copied

    def _encode(self, pieces: list[Piece]) -> bytes | None:
        """Encodes an anchor's blob from the mirror. Returns None if these pieces do not form
        one.
        """
        ordered = sorted(pieces, key=lambda piece: piece.offset)
        count = threads_of(self._threads)
        parts: list[bytes] = []
        at = 0
        with ThreadPoolExecutor(count, thread_name_prefix="encoder") as pool:
            coded = in_order(pool, self._encode_piece, ordered, ahead=count)
            for piece, part in zip(ordered, coded, strict=True):
                if piece.offset != at or piece.length != len(part):
                    return None
                parts.append(part)
                at += len(part)
        return b"".join(parts)

    def _encode_piece(self, piece: Piece) -> bytes:
        spec = self.run.tensors[piece.tensor]
        bits = self.mirror.find(spec.name, piece.start, piece.count)
        assert bits is not None
        return codec.encode_full(bits, spec.dtype, threads=1)

    def _commit(self, manifest: Manifest, data: bytes) -> None:
        """Creates the manifest unchanged; an existing one must be the same, or its tombstone."""
        key = keys.manifest(manifest.version)
        if self.destination.create(key, data):
            return
        try:
            there = read_manifest(self.destination, self.run, manifest.version)
        except CorruptError:
            self.destination.put(key, data)  # The manifest at the destination was unreadable.
            return
        if there is None or (
            (there.nonce, there.digest) != (manifest.nonce, manifest.digest)
            and not there.pruned
            and not manifest.pruned
        ):
            raise CorruptError(
                "the destination holds another version of this number",
                hint="only the relay may write to its destination; start with an empty one",
                run=self.destination.url,
                version=manifest.version,
                key=key,
            )


def copies_at_once(largest: float) -> int:
    """Returns how many blobs of at most ``largest`` bytes a relay copies together."""
    return max(1, min(REQUESTS, int(COPIED_BYTES / max(largest, 1.0))))


def _same_place(left: str, right: str) -> bool:
    """Returns whether two URLs name the same bucket; two memory buckets never do."""
    if left.startswith("memory:"):
        return False
    return posixpath.normpath(left) == posixpath.normpath(right)
