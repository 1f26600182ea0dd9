"""Keeping a region's bucket current: each delta crosses once, and a full model at most once.

Who waits for whom::

    source                      relay                                destination
      manifest N+1 ───────────▶ (its bytes, as they are)
      blobs of the delta ─────▶ each once ─────────────────────────▶ blobs
                                the mirror takes the delta, and
                                makes the anchor's blobs anew ─────▶ blobs
                                                       last of all ▶ manifest N+1, the same bytes

Manifests are copied byte for byte, so that their signatures hold at the destination as well; the
relay has no key and needs none. An anchor's blobs are made from the relay's own mirror: coding is a
function of the bits, so that they come out as the ones that the manifest names, and are held
against those names before they are put. One that does not (its writer's coder was another) is
copied, which is counted and told.

Everything that the relay knows lies in the destination. Stopped anywhere, it finds the newest
version there and goes on behind it; blobs of a version that is not committed yet are put again or
found to be there. Folds are made at the destination, of its own deltas; in a signed run, where a
fold needs the key, the source's are taken over once their blobs have been made.

What retention closes at the source is closed at the destination too, on the newest anchor that is
there, and its tombstones are the source's. So a region does not grow for ever.
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
from deltawire.store import Bucket
from deltawire.sync.chain.objects import (
    check_signed,
    get_blob,
    newest_retention_floor,
    newest_version,
    put_blob,
    read_manifest,
    read_run,
    with_retries,
)
from deltawire.sync.chain.payloads import read_blobs, read_payload, table_blobs
from deltawire.sync.follow.fetch import decode_delta, in_order, threads_of
from deltawire.sync.follow.load import fetch_anchor, load_mirror
from deltawire.sync.follow.mirror import Mirror, empty_mirror
from deltawire.sync.huggingface.checkpoint_dir import files_of
from deltawire.sync.maintain.compaction import COMPACTION_STRIDES, CompactionThread
from deltawire.sync.maintain.gc_intents import blobs_stay
from deltawire.sync.maintain.retention import GRACE_S, Pruned, prune
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
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

LOOK_EVERY_POLLS = 20

TIDY_EVERY_S = 300.0
"""How often, while nothing new is there, the source is asked what it has pruned."""

PATIENCE = 16
"""So many versions later a fold that the source of a signed run has not made is given up."""


@dataclass(frozen=True)
class Relayed:
    """What carrying one version over took. ``crossed`` bytes came from the source, of them
    ``anchor_copied`` those of an anchor; ``anchor_made`` were made here instead."""

    version: int
    pruned: bool
    crossed: int
    anchor_made: int
    anchor_copied: int
    seconds: float


class Relay:
    """Carries a run from one bucket to another, version by version.

    ``start`` is the version to begin with where the destination is empty: the newest anchor at or
    before it, the newest of all if it is None. ``strides`` are those of the folds made at the
    destination; in a signed run without ``signer``, of those the ones that the source has too.
    Unless ``retain`` is false, versions that the source has pruned are pruned at the destination,
    ``grace_s`` after they were closed there, whenever all that is at the source has been carried.
    Not for use by several threads at once; two relays to one destination do no harm.
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
        self.source = source
        self.destination = destination
        self._threads = threads
        self.crossed = 0
        """Bytes of manifests, blobs and run.json that came from the source, since this was made."""
        self._polls = 0
        self._retain = retain
        self._grace_s = grace_s
        self._tidy_at = 0.0
        self._tidied = 0
        self.run = self._take_run(public_key)
        newest = with_retries(lambda: newest_version(destination))
        self.mirror = self._resume(newest)
        self._next = self._first(start) if newest is None else newest + 1
        if newest is None and self._next:
            self._begin_with(self._next)
        self.compaction = CompactionThread(
            destination,
            self.run,
            strides,
            signer=signer,
            sealed=self._sealed_fold if self.run.public_key and signer is None else None,
            threads=threads,
        )

    @property
    def version(self) -> int:
        """The newest version that the destination can be read at, -1 before the first."""
        return self.mirror.version

    def advance(self, progress: Callable[[Relayed], None] | None = None) -> int:
        """Carry over everything that is at the source by now; how many versions that was."""
        count = 0
        while (done := self.step()) is not None:
            count += 1
            if progress is not None:
                progress(done)
        self.tidy()
        return count

    def follow(self, *, stop: threading.Event | None = None) -> Iterator[Relayed]:
        """Carry over version after version, waiting for the next, until ``stop`` is set."""
        stop = stop or threading.Event()
        while not stop.is_set():
            done = with_retries(self.step, pause=lambda s: _wait(stop, s))
            if done is None:
                if time.monotonic() > self._tidy_at:
                    self._tidy_at = time.monotonic() + TIDY_EVERY_S
                    self.tidy()
                stop.wait(self.source.poll_s)
                continue
            yield done

    def tidy(self) -> Pruned | None:
        """Retire at the destination what the source has pruned; None if that is nothing.

        Raises as `retire` does; then the same call may be made again.
        """
        boundary = with_retries(lambda: newest_retention_floor(self.source)) if self._retain else 0
        if not self._tidied < boundary <= self.mirror.version:
            return None
        found = prune(
            self.destination,
            self.run,
            cutoff=boundary,
            grace_s=self._grace_s,
            tombstones=self._tombstone,
        )
        if found.swept == found.boundary:
            self._tidied = boundary  # Nothing is left to do until the source retires more.
        return found

    def close(self) -> None:
        """Make the folds that are due, and end the thread that does."""
        self.compaction.close()

    def step(self) -> Relayed | None:
        """Carry over the next version; None if it is not at the source yet.

        Raises `CorruptError` if the source lost or damaged it, or the destination holds another
        version of that number, `RetryError` if one of the stores does not answer; then the same
        call may be made again.
        """
        started, crossed = time.perf_counter(), self.crossed
        version = self._next
        found = self._read(version)
        if found is None:
            self._check_lost(version)
            return None
        data, manifest = found
        made = copied = 0
        if not manifest.pruned:
            self._copy_files(manifest)
            if manifest.delta is not None:
                self._copy_refs(self._blobs(manifest.delta, version), version)
            made, copied = self._move(manifest)
        self._commit(manifest, data)
        if not manifest.pruned:
            self._keep_blobs(manifest)
        self._next = version + 1
        if self.mirror.version == version:
            self.compaction.wake(version)
        return Relayed(
            version,
            manifest.pruned,
            self.crossed - crossed,
            made,
            copied,
            time.perf_counter() - started,
        )

    def _tombstone(self, version: int) -> bytes | None:
        found = with_retries(lambda: self._read(version))
        return found[0] if found is not None and found[1].pruned else None

    def _begin_with(self, version: int) -> None:
        """Say at the destination that what is below ``version`` was never there."""
        key = keys.retention_floor(version)
        data = seal(RetentionFloor(run=self.run.id, version=version), key=key)
        with_retries(lambda: self.destination.create(key, data))

    def _take_run(self, public_key: str) -> Run:
        """run.json as it is, once its files are there."""
        run = with_retries(lambda: read_run(self.source, public_key=public_key))
        if run is None:
            raise InputError("there is no run", hint="is the path right?", run=self.source.url)
        there = with_retries(lambda: read_run(self.destination, public_key=public_key))
        if there is not None and there.id != run.id:
            raise InputError(
                "the destination holds another run",
                hint="choose an empty one",
                run=self.destination.url,
            )
        if there is None:
            data = self.source.get(keys.RUN, limit=MAX_RUN_BYTES)
            if data is None:
                raise RetryError("run.json was there and is gone", run=self.source.url)
            check_signed(self.source, run, data, keys.RUN)
            self.crossed += len(data)
            self._copy_refs([BlobRef(file.blob, file.bytes) for file in run.model_files])
            with_retries(lambda: self.destination.create(keys.RUN, data))
        return run

    def _resume(self, newest: int | None) -> Mirror:
        """The newest version that is stored at the destination, read there and not at the
        source."""
        for version in range(-1 if newest is None else newest, -1, -1):
            manifest = read_manifest(self.destination, self.run, version)
            if manifest is None or not manifest.pruned:
                try:
                    mirror = load_mirror(
                        self.destination, self.run, at=version, threads=self._threads
                    )
                except CorruptError:
                    if manifest is None:
                        raise
                    # It may have been killed before it could look after its blobs.
                    for ref in manifest.payloads:
                        self._copy_refs(self._blobs(ref, version), version)
                    mirror = load_mirror(
                        self.destination, self.run, at=version, threads=self._threads
                    )
                assert mirror is not None
                return mirror
        return empty_mirror(self.run)

    def _sealed_fold(self, base: int, target: int) -> tuple[bytes, CompactedDelta] | None:
        """The source's fold, whose signature is good at the destination too; None if it has none.
        It may come a little later than its version, and is waited for until it is long overdue."""
        key = keys.compacted(base, target)
        data = with_retries(lambda: self.source.get(key, limit=MAX_MANIFEST_BYTES))
        if data is None:
            if self._next - target <= PATIENCE:
                raise RetryError("the fold is not at the source yet", run=self.source.url, key=key)
            return None
        self.crossed += len(data)
        check_signed(self.source, self.run, data, key)
        table, url = self.run, self.source.url
        return data, decode_compacted(
            data, base=base, version=target, table=table, run=url, key=key
        )

    def _first(self, start: int | None) -> int:
        newest = with_retries(lambda: newest_version(self.source))
        if newest is None:
            return 0
        for version in range(newest if start is None else min(start, newest), -1, -1):
            found = self._read(version, count=False)
            if found is not None and found[1].anchor is not None:
                return version
        if start is not None and start < newest:
            raise InputError(
                f"no version up to {start} is stored whole at the source, or not any more",
                hint="begin with a newer one, or with the newest there is",
                run=self.source.url,
            )
        raise CorruptError("no version is stored whole", run=self.source.url)

    def _read(self, version: int, *, count: bool = True) -> tuple[bytes, Manifest] | None:
        """A manifest at the source, checked, and its bytes."""
        key = keys.manifest(version)
        data = self.source.get(key, limit=MAX_MANIFEST_BYTES)
        if data is None:
            return None
        self.crossed += len(data) if count else 0
        check_signed(self.source, self.run, data, key)
        manifest = decode_manifest(
            data, version=version, table=self.run, run=self.source.url, key=key
        )
        return data, manifest

    def _check_lost(self, version: int) -> None:
        """A manifest that is not there, but one behind it is, was lost: do not wait for it."""
        self._polls += 1
        if self._polls % LOOK_EVERY_POLLS != 1:
            return
        newer = newest_version(self.source, newer_than=version)
        if newer is not None and not self.source.exists(keys.manifest(version)):
            raise CorruptError(
                "the manifest is missing at the source, and newer ones are there",
                hint="begin in an empty destination, at a newer anchor",
                run=self.source.url,
                version=version,
                key=keys.manifest(version),
            )

    def _copy_files(self, manifest: Manifest) -> None:
        self._copy_refs([BlobRef(f.blob, f.bytes) for f in files_of(self.run, manifest)])

    def _blobs(self, ref: PayloadRef, version: int) -> list[BlobRef]:
        """The blobs of a payload, by its piece table, which is copied first."""
        tables = table_blobs([ref])
        self._copy_refs(tables, version)
        try:
            return with_retries(lambda: read_blobs(self.destination, self.run, ref))
        except CorruptError:
            # A table that was there before is trusted for its size only: copy it again.
            for table in tables:
                self._carry(table, version)
            return with_retries(lambda: read_blobs(self.destination, self.run, ref))

    def _copy_refs(self, refs: list[BlobRef], version: int | None = None) -> None:
        """Blobs that the destination lacks, each held against its name on its way."""
        for ref in refs:
            if with_retries(lambda r=ref: self.destination.size(keys.blob(r.hash))) != ref.bytes:  # type: ignore[misc]
                self._carry(ref, version)

    def _carry(self, ref: BlobRef, version: int | None) -> None:
        data = with_retries(lambda: get_blob(self.source, ref, version=version))
        self.crossed += len(data)
        put_blob(self.destination, bytes(data))

    def _move(self, manifest: Manifest) -> tuple[int, int]:
        """Bring the mirror to the version, and its anchor's blobs to the destination: made here
        if the delta leads there, else copied. How many bytes were made, and how many copied."""
        follows = manifest.delta is not None and manifest.base == self.mirror.version
        if follows:
            assert manifest.delta is not None
            try:
                self._take_delta(manifest, manifest.delta)
            except CorruptError:
                # Blobs that lay there before are believed by their size alone: once more, whole.
                tables = table_blobs([manifest.delta])
                for ref in [*tables, *self._blobs(manifest.delta, manifest.version)]:
                    self._carry(ref, manifest.version)
                self._take_delta(manifest, manifest.delta)
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
        """What retention at the destination took before the commit is carried or made again: blobs
        that lay there already were counted on, and may have been nobody's."""
        refs = table_blobs(manifest.payloads)
        for payload in manifest.payloads:
            refs += self._blobs(payload, manifest.version)
        refs += [BlobRef(file.blob, file.bytes) for file in files_of(self.run, manifest)]
        if blobs_stay(self.destination, self.run, refs):
            return
        if manifest.anchor is not None and self.mirror.version == manifest.version:
            self._make_anchor(manifest, manifest.anchor)
        self._copy_refs(refs, manifest.version)
        if not blobs_stay(self.destination, self.run, refs):
            raise RetryError(
                "blobs that were just put are gone again",
                run=self.destination.url,
                version=manifest.version,
            )

    def _take_delta(self, manifest: Manifest, payload: PayloadRef) -> None:
        pieces, held = decode_delta(
            self.destination, self.run, manifest, payload, self.mirror, threads=self._threads
        )
        self.mirror.move(pieces, manifest.version, Digest.from_hex(manifest.digest), held)

    def _make_anchor(self, manifest: Manifest, stated: PayloadRef) -> tuple[int, int]:
        made = copied = 0
        self._blobs(stated, manifest.version)
        anchor = with_retries(lambda: read_payload(self.destination, self.run, manifest, stated))
        pieces: dict[int, list[Piece]] = {}
        for piece in anchor.pieces:
            pieces.setdefault(piece.blob, []).append(piece)
        for number, ref in enumerate(anchor.blobs):
            if self.destination.size(keys.blob(ref.hash)) == ref.bytes:
                continue
            data = self._code(pieces.get(number, []))
            if data is not None and blake3(data).hexdigest() == ref.hash:
                put_blob(self.destination, data)
                made += len(data)
            else:
                self._carry(ref, manifest.version)
                copied += ref.bytes
        return made, copied

    def _code(self, pieces: list[Piece]) -> bytes | None:
        """An anchor's blob out of the mirror; None if it cannot be made of these pieces."""
        ordered = sorted(pieces, key=lambda piece: piece.offset)
        count = threads_of(self._threads)
        parts: list[bytes] = []
        at = 0
        with ThreadPoolExecutor(count, thread_name_prefix="encoder") as pool:
            coded = in_order(pool, self._code_piece, ordered, ahead=count)
            for piece, part in zip(ordered, coded, strict=True):
                if piece.offset != at or piece.length != len(part):
                    return None
                parts.append(part)
                at += len(part)
        return b"".join(parts)

    def _code_piece(self, piece: Piece) -> bytes:
        spec = self.run.tensors[piece.tensor]
        bits = self.mirror.find(spec.name, piece.start, piece.count)
        assert bits is not None
        return codec.encode_full(bits, spec.dtype, threads=1)

    def _commit(self, manifest: Manifest, data: bytes) -> None:
        """The manifest last, as it is. One that is there already is this one, or its tombstone."""
        key = keys.manifest(manifest.version)
        if with_retries(lambda: self.destination.create(key, data)):
            return
        there = with_retries(lambda: read_manifest(self.destination, self.run, manifest.version))
        if there is None or (
            (there.nonce, there.digest) != (manifest.nonce, manifest.digest)
            and not there.pruned
            and not manifest.pruned
        ):
            raise CorruptError(
                "the destination holds another version of this number",
                hint="has somebody published there?",
                run=self.destination.url,
                version=manifest.version,
                key=key,
            )


def _same_place(left: str, right: str) -> bool:
    """Whether two URLs name one bucket. Those of memory name none."""
    if left.startswith("memory:"):
        return False
    return posixpath.normpath(left) == posixpath.normpath(right)


def _wait(stop: threading.Event, seconds: float) -> None:
    stop.wait(seconds)
