"""Keeps another region's bucket current: each delta crosses once, a full model at most once.

Concurrency::

    source                      relay                              destination
      manifest N+1 ───────────▶ (its bytes, unchanged)
      blobs of the delta ─────▶ each once, checked by its name ──▶ blobs
                                                     last of all ▶ manifest N+1, the same bytes
                                thread: anchors, from the region's own deltas
                                (see `region_anchors`)
                                thread: compacted deltas (see `compaction`)

Manifests are copied byte for byte, so their signatures hold at the destination as well; the relay
has no key and needs none. A version is committed as soon as its blobs are stored: the relay checks
seals, signatures and the BLAKE3 of every blob on the way, and decodes nothing. Readers decode, and
compare every step with its digests before they use it, wherever they read it; a version that its
writer encoded wrongly is refused at the destination as it is at the source.

The relay keeps all its state in the destination. After a stop at any point, it finds the newest
version there and continues; blobs of an uncommitted version are stored again. Compacted deltas are
made at the destination, from its own deltas; in a signed run, where they need the key, the source's
are copied once their blobs have been made.

Versions that retention prunes at the source are pruned at the destination too, down to the newest
anchor that is there, with the source's tombstones. A region's bucket therefore does not grow
without bound. A manifest that the source lost is passed over. One that cannot be read there is
passed over, as by readers, only if a later version does without it (see `source_versions`);
otherwise the relay waits for it. Either is the relay's ``alarm``.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from deltawire.errors import CorruptError, DeltawireError, InputError, RetryError, UnreadableError
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import Sound, Unknown, evidence_of, require_evidence
from deltawire.sync.chain.gc_intents import blobs_stay
from deltawire.sync.chain.objects import (
    check_floor,
    check_signed,
    committed_versions,
    files_of,
    find_run,
    later_anchors,
    newest_retention_floor,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.payloads import read_blobs, table_blobs
from deltawire.sync.chain.retention import GRACE_S, Pruned, SealedElsewhere, prune
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.sync.maintain.blob_copies import BlobCopies
from deltawire.sync.maintain.region_anchors import WITHIN, RegionAnchors, RelayedAnchor
from deltawire.sync.maintain.source_versions import SourceVersions
from deltawire.sync.publish.compaction import COMPACTION_STRIDES, CompactionThread
from deltawire.wire import keys
from deltawire.wire.coordination import MAX_FLOOR_BYTES, RetentionFloor
from deltawire.wire.manifest import (
    MAX_MANIFEST_BYTES,
    CompactedDelta,
    Manifest,
    decode_compacted,
)
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import MAX_RUN_BYTES, decode_run
from deltawire.wire.seal import Signer, seal

PRUNE_EVERY_S = 300.0
"""Seconds between checks of what the source has pruned, while it has no new version."""

PATIENCE = 16
"""After this many further versions, a compacted delta that is missing at the source of a signed run
is given up.
"""


@dataclass(frozen=True)
class Relayed:
    """The cost of copying one version, or of storing the anchor of one (``kind``), which follows
    its version. ``crossed`` bytes came from the source since the report before; of an anchor,
    ``anchor_made`` bytes were encoded here and ``anchor_copied`` came from the source. ``alarm``
    names a manifest at the source that could not be read; of the kind ``alarm``, the relay waits
    for it. ``anchor_error`` and ``compaction_error`` explain why an anchor or a compacted delta
    could not be made here.

    Example::

        for done in relay.follow():
            print(done.kind, done.version, done.crossed, done.seconds)
    """

    version: int
    pruned: bool
    crossed: int
    anchor_made: int
    anchor_copied: int
    seconds: float
    alarm: str = ""
    compaction_error: str = ""
    anchor_error: str = ""
    kind: Literal["version", "anchor", "alarm"] = "version"


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
        self.source = source
        self.destination = destination
        self._reported = 0
        self._retain = retain
        self._grace_s = grace_s
        self._prune_at = 0.0
        self._pruned_below = 0
        self._prune_error: UnreadableError | None = None
        self._copied: set[str] = set()
        """Blobs of the version in progress that are at the destination."""
        self.run = read_run(self.source, public_key=public_key)
        self._copies = BlobCopies(self.source, self.destination, self.run)
        self._copy_run(public_key)
        self._keyless = bool(self.run.public_key) and signer is None
        self._versions = SourceVersions(self.source, self.run, count=self._copies.count)
        self.anchors = RegionAnchors(
            self.run, self._copies, unsigned=self._keyless, threads=threads
        )
        self._done = self._resume()
        self._first_version = -1
        """The version that this relay begins with, -1 if another has begun."""
        if self._done < 0:
            self._first_version = first = self._first(start)
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
        """The newest version that was copied, -1 before the first."""
        return -1 if self._done < self._first_version else self._done

    @property
    def crossed(self) -> int:
        """Bytes of manifests, blobs and run.json that this object has read from the source."""
        return self._copies.crossed

    @property
    def alarm(self) -> DeltawireError | None:
        """The reason why an object at the source could not be read, None if all could."""
        return self._versions.alarm or self._prune_error

    def advance(self, progress: Callable[[Relayed], None] | None = None) -> int:
        """Copies every version that is now at the source, and then the anchors. Returns the number
        of versions.

        Raises `UnreadableError` at the end if a version could not be read that must not be passed
        over.
        """
        count = 0
        while (done := self.step()) is not None:
            count += 1
            if progress is not None:
                progress(done)
        self.anchors.wake(self._done)
        self.anchors.wait()
        for anchor in self._finished_anchors():
            if progress is not None:
                progress(anchor)
        self.prune()
        if self._versions.blocked is not None:
            raise self._versions.blocked
        return count

    def follow(self, *, stop: threading.Event | None = None) -> Iterator[Relayed]:
        """Copies version after version, waiting for the next, until ``stop`` is set. An object that
        cannot be read is reported once, and asked for again.
        """
        stop = stop or threading.Event()
        reported = ""
        while not stop.is_set():
            yield from self._finished_anchors()
            done = self.step()
            if done is None:
                if time.monotonic() > self._prune_at:
                    self._prune_at = time.monotonic() + PRUNE_EVERY_S
                    self.anchors.wake(self._done)
                    self._prune_or_note()
                waits = self._versions.blocked or self._prune_error
                if waits is not None and str(waits) != reported:
                    yield self._alarm(waits)
                reported = "" if waits is None else str(waits)
                stop.wait(self._versions.pause_s)
                continue
            yield done

    def prune(self) -> Pruned | None:
        """Prunes at the destination what the source has pruned. Returns None if there was nothing
        to prune.

        Raises as `retention.prune`; the same call may then be repeated.
        """
        floor = newest_retention_floor(self.source, self.run) if self._retain else 0
        if not self._pruned_below < floor <= self._done:
            return None
        found = prune(
            self.destination,
            self.run,
            cutoff=floor,
            grace_s=self._grace_s,
            sealed=SealedElsewhere(self._versions.tombstone, self._floor),
        )
        if found.pruned_below == found.floor:
            self._pruned_below = floor  # Nothing to do until the source prunes more.
        return found

    def _prune_or_note(self) -> None:
        """Prunes, unless an object cannot be read: that is the alarm until a later call."""
        try:
            self.prune()
            self._prune_error = None
        except UnreadableError as error:
            self._prune_error = error

    def close(self) -> None:
        """Makes the anchors and compacted deltas that are due, and ends the threads."""
        self.anchors.close()
        self.compaction.close()

    def step(self) -> Relayed | None:
        """Copies the next version; None if there is none at the source yet.

        Raises `CorruptError` if the source lost or damaged its blobs, or the destination holds
        another version of that number, `RetryError` if one of the stores does not answer; the same
        call may then be repeated.
        """
        started = time.perf_counter()
        found = self._versions.after(self._done, passing=self.version >= 0)
        if found is None:
            return None
        data, manifest = found
        version = manifest.version
        anchor: RelayedAnchor | None = None
        if not manifest.pruned:
            self._copies.copy_files(manifest)
            anchor = self._copy_payloads(manifest)
        self._commit(manifest, data)
        if not manifest.pruned:
            self._keep_blobs(manifest)
        self._done = version
        self._copied.clear()
        self.compaction.wake(version)
        self.anchors.wake(version)
        return self._report(version, started, pruned=manifest.pruned, anchor=anchor)

    def _copy_payloads(self, manifest: Manifest) -> RelayedAnchor | None:
        """Copies the blobs of a version, and those of its anchor if the version has one from its
        commit on or nothing here leads to it.
        """
        version, anchor = manifest.version, None
        if manifest.delta is not None:
            tables = table_blobs([manifest.delta])
            self._copies.copy_all(tables, version, except_for=self._copied)
            blobs = read_blobs(self.destination, self.run, manifest.delta)
            self._copies.copy_all(blobs, version, except_for=self._copied)
        begins = version == self._first_version
        if manifest.anchor is not None:
            anchor = self.anchors.store_stated(manifest, copy=begins)
        elif begins:
            anchor = self.anchors.store(version, copy=True)
        return anchor

    def _report(
        self, version: int, started: float, *, pruned: bool, anchor: RelayedAnchor | None
    ) -> Relayed:
        crossed, self._reported = self.crossed - self._reported, self.crossed
        return Relayed(
            version,
            pruned,
            crossed,
            0 if anchor is None else anchor.made,
            0 if anchor is None else anchor.copied,
            time.perf_counter() - started,
            alarm="" if self.alarm is None else str(self.alarm),
            compaction_error=self._compaction_error(),
            anchor_error=str(self.anchors.error or "") or ("" if anchor is None else anchor.fault),
        )

    def _finished_anchors(self) -> Iterator[Relayed]:
        for anchor in self.anchors.take_finished():
            crossed, self._reported = self.crossed - self._reported, self.crossed
            yield Relayed(
                anchor.version,
                pruned=False,
                crossed=crossed,
                anchor_made=anchor.made,
                anchor_copied=anchor.copied,
                seconds=anchor.seconds,
                anchor_error=anchor.fault,
                kind="anchor",
            )

    def _alarm(self, error: UnreadableError) -> Relayed:
        version = self._done + 1 if error.version is None else error.version
        return Relayed(version, False, 0, 0, 0, 0.0, alarm=str(error), kind="alarm")

    def _compaction_error(self) -> str:
        error = self.compaction.error  # A delta that the source has not made yet is not an error.
        return "" if error is None or isinstance(error, RetryError) else str(error)

    def _floor(self, version: int) -> bytes | None:
        """Returns the bytes of a floor at the source, checked as a reader would: they are created
        at the destination once."""
        key = keys.retention_floor(version)

        def read() -> bytes | None:
            data = self.source.get(key, limit=MAX_FLOOR_BYTES)
            if data is not None:
                check_floor(self.source, self.run, version, data)
            return data

        return require_evidence(self.source, key, read)

    def _begin_with(self, version: int) -> None:
        """Records at the destination that it never held a version below ``version``."""
        key = keys.retention_floor(version)
        data = seal(RetentionFloor(run=self.run.id, version=version), key=key)
        self.destination.create(key, data)

    def _copy_run(self, public_key: str) -> None:
        """Copies run.json unchanged, after its files."""
        there = require_evidence(
            self.destination,
            keys.RUN,
            lambda: find_run(self.destination, public_key=public_key),
            so="nothing was copied",
        )
        if there is not None and there.id != self.run.id:
            raise InputError(
                "the destination holds another run",
                hint="choose an empty destination",
                run=self.destination.url,
            )
        if there is None:
            data = require_evidence(
                self.source, keys.RUN, self._run_at_source, so="nothing was copied"
            )
            if data is None:
                raise RetryError(
                    "run.json existed and is now missing", run=self.source.url, key=keys.RUN
                )
            self._copies.count(len(data))
            files = [BlobRef(file.blob, file.bytes) for file in self.run.model_files]
            self._copies.copy_missing(files)
            self.destination.create(keys.RUN, data)

    def _run_at_source(self) -> bytes | None:
        """Reads the bytes of run.json and checks them as a reader of the destination will: they
        are created there once, and stay."""
        data = self.source.get(keys.RUN, limit=MAX_RUN_BYTES)
        if data is None:
            return None
        check_signed(self.source, self.run, data, keys.RUN)
        if decode_run(data, run=self.source.url, key=keys.RUN) != self.run:
            raise CorruptError("run.json is another than before", run=self.source.url, key=keys.RUN)
        return data

    def _resume(self) -> int:
        """Returns the newest version at the destination, -1 if there is none. An earlier relay may
        have been killed before it checked that version's blobs.
        """
        newest = newest_readable(self.destination, self.run)
        if newest is None:
            copied = newest_version(self.destination)
            return -1 if copied is None else copied
        self._keep_blobs(newest)
        return newest.version

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
        self._copies.count(len(data))
        check_signed(self.source, self.run, data, key)
        table, url = self.run, self.source.url
        return data, decode_compacted(
            data, base=base, version=target, table=table, run=url, key=key
        )

    def _first(self, start: int | None) -> int:
        newest = newest_readable(self.source, self.run)
        if newest is None:
            return 0
        at_most = newest.version if start is None else min(start, newest.version)
        later = set(
            later_anchors(self.source, newer_than=max(at_most - WITHIN, -1))
            or later_anchors(self.source, newer_than=-1)
        )
        for version in sorted(committed_versions(self.source), reverse=True):
            if version > at_most:
                continue
            try:
                found = read_manifest(self.source, self.run, version)
            except CorruptError:
                continue  # Beginning with an older anchor copies more, and loses nothing.
            if found is not None and (found.anchor is not None or version in later):
                return version
        if start is not None and start < newest.version:
            raise InputError(
                f"the source has no anchor at or before version {start}",
                hint="start with a newer version, or with the newest",
                run=self.source.url,
            )
        raise CorruptError("the source has no anchor", run=self.source.url)

    def _keep_blobs(self, manifest: Manifest) -> None:
        """Stores blobs again that retention at the destination deleted before the commit: the relay
        had found them there, but perhaps no object referred to them.
        """
        version = manifest.version
        refs = self._copies.blobs_of(manifest.payloads, version)
        refs += [BlobRef(file.blob, file.bytes) for file in files_of(self.run, manifest)]
        if blobs_stay(self.destination, self.run, refs, unsigned=self._keyless):
            return
        self._copies.copy_missing(refs, version)
        if not blobs_stay(self.destination, self.run, refs, unsigned=self._keyless):
            raise RetryError(
                "blobs that were just stored are missing again",
                run=self.destination.url,
                version=version,
            )

    def _commit(self, manifest: Manifest, data: bytes) -> None:
        """Creates the manifest unchanged; an existing one must be the same, or its tombstone."""
        key = keys.manifest(manifest.version)
        if self.destination.create(key, data):
            return
        read = partial(read_manifest, self.destination, self.run, manifest.version)
        found = evidence_of(self.destination, key, read)
        if isinstance(found, Unknown):
            # No answer was sound, on any connection. Nothing but these bytes belongs here, and a
            # tombstone is only where this relay has been already.
            self.destination.put(key, data)
            return
        there = found.value if isinstance(found, Sound) else None
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


def _same_place(left: str, right: str) -> bool:
    """Returns whether two URLs name the same bucket; two memory buckets never do."""
    if left.startswith("memory:"):
        return False
    return posixpath.normpath(left) == posixpath.normpath(right)
