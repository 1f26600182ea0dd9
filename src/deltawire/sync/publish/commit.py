"""Commits versions: the path that all publishers share, for one process and for many ranks.

The steps, all of which are required, in order::

    read the head ▶ encode against the baseline, upload blobs ▶ merge the parts and check them as a
    reader would ▶ create the manifest ▶ read back whose it is ▶ check the retention floor, keep the
    blobs ▶ baseline ⇄ staging

The baseline equals the newest manifest's version. It advances only when that manifest exists, so a
failed version is encoded again from what readers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import BugError, CorruptError, FencedError, InputError, RetryError
from deltawire.store import (
    Bucket,
    ObjectMeta,
    WriterBucket,
    check_create_if_absent,
    in_parallel,
)
from deltawire.store.traffic import count
from deltawire.sync.chain.evidence import read_again, require_evidence
from deltawire.sync.chain.gc_intents import LISTINGS
from deltawire.sync.chain.objects import (
    check_manifest,
    check_signer,
    find_run,
    newest_retention_floor,
    read_manifest,
)
from deltawire.sync.chain.payloads import store_payload, table_blobs
from deltawire.sync.follow.mirror import Bits, Mirror
from deltawire.sync.publish.anchor_schedule import AnchorSchedule
from deltawire.sync.publish.anchors import (
    NOTHING,
    find_anchor,
    restore_anchor,
    upload_anchor,
)
from deltawire.sync.publish.encoding import (
    BLOB_BYTES,
    Chunk,
    chunks_of,
    digest_chunks,
    keep_blobs,
    upload_delta,
)
from deltawire.sync.publish.merging import merge_parts
from deltawire.wire import keys
from deltawire.wire.coordination import Part
from deltawire.wire.manifest import MAX_METADATA_BYTES, Manifest, encode_manifest
from deltawire.wire.payload import BlobRef, Payload, PayloadRef, add_sums
from deltawire.wire.run import ModelFile, Run
from deltawire.wire.seal import Signer

STEP_RECORD = "global_step"
"""The member of the commit metadata that holds the step of a trainer outside deltawire."""


class Encoded(NamedTuple):
    """One writer's uploaded share of a version: its payloads, the digest of each chunk, and the
    number of changed elements.
    """

    delta: Payload | None
    anchor: Payload | None
    sums: dict[Chunk, Digest]
    changed: int

    @property
    def payloads(self) -> list[Payload]:
        """The payloads that exist."""
        return [payload for payload in (self.delta, self.anchor) if payload is not None]

    @property
    def digest(self) -> Digest:
        """The digest of this writer's share of the version."""
        return sum(self.sums.values(), codec.ZERO)


@dataclass(frozen=True)
class CommitStats:
    """Sizes and times of one committed version; the trainer waited for ``blocked_ms``.

    ``bytes_reused`` of ``bytes_anchor`` are blobs of the previous anchor, which were not uploaded
    again. ``compaction_error`` is the reason why compacted deltas are missing, if any are.
    ``superseded`` counts the publisher's versions that a newer one replaced while the store was
    away.

    Example::

        publisher = Publisher(bucket, run, mirror, epoch=1, on_commit=show)

        def show(stats: CommitStats) -> None:
            print(stats.version, stats.bytes_delta, stats.blocked_ms)
    """

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
    compaction_error: str = ""
    bytes_reused: int = 0
    superseded: int = 0

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        run: Run,
        *,
        changed: int,
        blocked_ms: float,
        encode_ms: float,
        upload_ms: float,
        compaction_error: str,
        bytes_reused: int = 0,
        superseded: int = 0,
    ) -> CommitStats:
        """Describes what ``manifest`` committed; ``changed`` counts the elements of its delta."""
        elements = sum(tensor.count for tensor in run.tensors)
        return cls(
            version=manifest.version,
            digest=manifest.digest,
            bytes_delta=manifest.delta.bytes if manifest.delta else 0,
            bytes_full=sum(
                tensor.count * codec.unsigned_of(tensor.dtype).itemsize for tensor in run.tensors
            ),
            bytes_anchor=manifest.anchor.bytes if manifest.anchor else 0,
            changed=changed if manifest.delta else elements,
            elements=elements,
            blocked_ms=blocked_ms,
            encode_ms=encode_ms,
            upload_ms=upload_ms,
            compaction_error=compaction_error,
            bytes_reused=bytes_reused,
            superseded=superseded,
        )


class VersionWriter:
    """Takes one writer's weights from version to version along the commit path.

    ``baseline`` holds this writer's part of the newest version: the whole model or ranges of it.
    ``staging`` has the same shape and takes the next weights. A mirror at version -1 belongs to a
    run that has no version yet. ``epoch`` must exceed that of every existing manifest. If the
    ``newest`` version can no longer be reached, the mirror holds an older one; the next version
    then comes after both, and has an anchor for readers of either. Tensors named in ``frozen`` are
    not expected to change: anchors keep them apart from the others, and upload them once.

    Raises `InputError` if the store does not honor create-if-absent.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        mirror: Mirror,
        *,
        epoch: int,
        schedule: AnchorSchedule,
        signer: Signer | None = None,
        threads: int | None = None,
        blob_bytes: int = BLOB_BYTES,
        newest: int = -1,
        frozen: Collection[str] = (),
    ) -> None:
        check_signer(bucket, run, signer)
        self.bucket = WriterBucket.over(bucket)
        check_create_if_absent(self.bucket)
        self.run = run
        self.epoch = epoch
        self.signer = signer
        self.schedule = schedule
        self._threads = threads
        self._blob_bytes = blob_bytes
        self._frozen = frozenset(frozen)
        self._anchor: Payload | None = None
        """This writer's part of the newest anchor, None until it is needed."""
        self._listed: set[str] = set()
        """The blobs of the newest anchor of all parts."""
        self.bytes_reused = 0
        """Bytes of the anchor built last that were stored for the anchor before it."""
        if mirror.version < 0:
            mirror.clear()
        self.baseline = mirror
        # Of tensors that do not change, a second copy would never be written.
        self.staging = mirror.copy(shared=self._frozen if mirror.version >= 0 else ())
        self.differing: set[str] = set()
        """Names of the tensors whose staged bits may differ from the baseline's; only these are
        encoded. The code that writes to ``staging`` adds them.
        """
        self.chunks = chunks_of(run, mirror)
        self._sums: dict[Chunk, Digest] = {}
        self._skipped = max(newest - mirror.version, 0) if mirror.version >= 0 else 0
        self._stored: dict[PayloadRef, Payload] = {}
        """The payloads of this writer's newest part, so that they are not read back."""
        self._merged: list[Payload] = []
        """The payloads of the manifest that this writer built last."""
        self._public_key = signer.public_key if signer else ""
        self._run_object: ObjectMeta | None = None
        """The run's description when it was read last."""
        self.head_checked = False
        """True if the run's newest manifest is known to be the baseline's."""
        if mirror.version >= 0:
            self._sums = digest_chunks(self.chunks, mirror, threads=threads)
            self._check_sums()
            self.skip_unreadable()

    def staged(self, name: str) -> Bits:
        """Returns the memory that takes a tensor's next bits, which the baseline does not share."""
        bits = self.staging.tensors[name]
        if bits is self.baseline.tensors[name]:
            bits = self.staging.tensors[name] = bits.copy()
        return bits

    def touched(self, size: int) -> None:
        """Counts bytes that were copied to the staging buffers, perhaps from the baseline."""
        self.baseline.touched(size)
        self.staging.touched(size)

    def close(self) -> None:
        """Gives back the memory, or the files, of the baseline and the staging buffers."""
        self.baseline.close()
        self.staging.close()

    @property
    def first(self) -> bool:
        """Return whether the next version is version 0."""
        return self.baseline.version < 0

    @property
    def next_version(self) -> int:
        """The version after the baseline, or the next one whose number is free."""
        return self.baseline.version + 1 + self._skipped

    def skip_unreadable(self) -> None:
        """Skips numbers above the baseline that damaged or foreign manifests occupy.

        No reader can use them, so the run continues from the baseline at the next free number.
        """
        while not self.first:
            try:
                self.find(self.next_version)
            except CorruptError:
                self._skipped += 1
            else:
                break

    def skip_to(self, version: int) -> None:
        """Takes ``version`` as the next number. Those before it belong to no version of the run
        whose numbers this one follows."""
        if self.first or version < self.next_version:
            raise BugError(f"version {version} cannot follow {self.baseline.version}")
        self._skipped = version - self.baseline.version - 1

    def check_metadata(self, metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Returns ``metadata``; raises `InputError` if it is larger than readers accept."""
        found = metadata or {}
        size = len(msgspec.json.encode(found))
        if size > MAX_METADATA_BYTES:
            raise InputError(
                f"the commit metadata has {size} bytes; the most is {MAX_METADATA_BYTES}",
                hint="store large data in separate objects and refer to them",
                run=self.bucket.url,
                version=self.next_version,
            )
        return found

    def check_head(self) -> None:
        """Checks once that the run's manifest at the baseline's version is what this writer holds.

        Raises `FencedError` if it is not, or if a later epoch wrote it, and `UnreadableError` if
        that is unknown: one bad answer must not end the only writer.
        """
        if self.first or self.head_checked:
            return
        version = self.baseline.version
        read = partial(read_manifest, self.bucket, self.run, version)
        head = require_evidence(
            self.bucket, keys.manifest(version), read, so="nothing was published"
        )
        if head is None or head.digest != self.baseline.digest.hex() or head.epoch > self.epoch:
            raise FencedError(
                "this publisher's base is not a version of the run",
                hint="load the newest version again, with a higher epoch",
                run=self.bucket.url,
                version=self.baseline.version,
            )
        self.schedule.resume(self.bucket, self.run, head)
        self.head_checked = True

    def encode(self) -> Encoded:
        """Encodes and uploads the staged weights as a delta, and where no delta leads, as an
        anchor.
        """
        return self._encode(whole=self.whole)

    @property
    def whole(self) -> bool:
        """True if the next version cannot be committed without an anchor: it begins the run, or
        readers hold a version that nothing leads on from.
        """
        return self.first or bool(self._skipped)

    def _encode(self, *, whole: bool) -> Encoded:
        delta, anchor, changed = None, None, 0
        differing = [chunk for chunk in self.chunks if chunk.name in self.differing]
        if self.first:
            sums = digest_chunks(self.chunks, self.staging, threads=self._threads)
        else:
            delta, sums, changed = upload_delta(
                self.bucket, self.run, differing, self.baseline, self.staging, self._sums,
                threads=self._threads, blob_bytes=self._blob_bytes,
            )  # fmt: skip
        if whole:
            anchor, _ = self.upload_anchor(self.staging, sums)
        return Encoded(delta, anchor, sums, changed)

    def upload_anchor(self, mirror: Mirror, sums: Mapping[Chunk, Digest]) -> tuple[Payload, int]:
        """Encodes and uploads ``mirror``, which holds a committed version; returns the anchor, and
        how many of its bytes were stored for the anchor before it.
        """
        payload = upload_anchor(
            self.bucket, self.run, self.chunks, mirror,
            sums=sums, before=self._previous_anchor(), frozen=self._frozen,
            threads=self._threads, blob_bytes=self._blob_bytes,
        )  # fmt: skip
        return payload, sum(ref.bytes for ref in payload.blobs if ref.hash in self._listed)

    def remember_anchor(self, payload: Payload, blobs: Sequence[BlobRef] | None = None) -> None:
        """Makes ``payload`` the anchor whose blobs the next one may list again; ``blobs`` are those
        of all parts.
        """
        self._anchor = payload
        self._listed = {ref.hash for ref in (payload.blobs if blobs is None else blobs)}

    def _previous_anchor(self) -> Payload:
        if self._anchor is None:
            self._anchor = NOTHING
            if not self.first:
                self._anchor = find_anchor(self.bucket, self.run, newest=self.baseline.version)
                self._listed = {ref.hash for ref in self._anchor.blobs}
        return self._anchor

    def part(self, encoded: Encoded, *, rank: int, ranks: int) -> Part:
        """Describes this writer's share of the next version, whose piece tables are stored."""
        version = self.next_version

        def store(payload: Payload | None) -> PayloadRef | None:
            if payload is None:
                return None
            ref = store_payload(self.bucket, self.run, payload, version=version)
            self._stored[ref] = payload
            return ref

        self._stored.clear()
        return Part(
            run=self.run.id,
            version=version,
            rank=rank,
            ranks=ranks,
            epoch=self.epoch,
            base_digest=self._base_digest,
            digest=encoded.digest.hex(),
            delta=store(encoded.delta),
            anchor=store(encoded.anchor),
            changed=encoded.changed,
        )

    def anchor_part(self, manifest: Manifest, payload: Payload, *, rank: int, ranks: int) -> Part:
        """Describes this writer's share of the anchor of a committed version."""
        return Part(
            run=self.run.id,
            version=manifest.version,
            rank=rank,
            ranks=ranks,
            epoch=self.epoch,
            base_digest=codec.ZERO.hex(),
            digest=add_sums([piece.sum for piece in payload.pieces]),
            anchor=store_payload(self.bucket, self.run, payload, version=manifest.version),
        )

    def merge(
        self,
        parts: Sequence[Part],
        *,
        nonce: str,
        metadata: dict[str, Any],
        files: list[ModelFile] | None = None,
    ) -> tuple[Manifest, bytes]:
        """Builds the manifest that commits all ``parts``, and the bytes that it is sealed in.

        Raises `InputError` for everything that a reader would refuse (see `merge_parts`), limits
        included.
        """
        manifest, self._merged = merge_parts(
            self.bucket,
            self.run,
            parts,
            base=None if self.first else self.baseline.version,
            base_digest=self._base_digest,
            nonce=nonce,
            metadata=metadata,
            files=files,
            stored=self._stored,
        )
        anchors = self._merged[-1:] if manifest.anchor is not None else []
        self.bytes_reused = sum(
            ref.bytes for one in anchors for ref in one.blobs if ref.hash in self._listed
        )
        data = encode_manifest(manifest, signer=self.signer)
        check_manifest(self.bucket, self.run, manifest.version, data)
        return manifest, data

    def find(self, version: int) -> Manifest | None:
        """Reads the manifest at a version, None if there is none.

        Raises `CorruptError` for an object that no connection delivers whole: the number is then
        skipped, so that nothing that is stored there can end the run.
        """
        read = partial(read_manifest, self.bucket, self.run, version)
        return read_again(self.bucket, keys.manifest(version), read)

    def check_run(self) -> None:
        """Checks that the bucket still describes this run: readers need it.

        Raises `InputError` if it does not, and `UnreadableError` if that is unknown: one bad answer
        must not end the only writer.
        """
        found = self.bucket.head(keys.RUN)
        if found is not None and found == self._run_object:
            return
        read = partial(find_run, self.bucket, public_key=self._public_key)
        held = require_evidence(self.bucket, keys.RUN, read, so="the version does not count yet")
        if held is None or held.id != self.run.id:
            what = "has disappeared" if held is None else "describes another run"
            raise InputError(
                f"{keys.RUN} {what}, so no reader can use what is published here",
                hint="put it back, for example from a relay; or start a new run elsewhere",
                run=self.bucket.url,
                key=keys.RUN,
            )
        self._run_object = found

    def confirm(self, manifest: Manifest, encoded: Encoded, *, leader: bool = True) -> None:
        """Checks after the commit that the bucket describes the run (by the ``leader``), and that
        retention deleted neither the version nor its blobs.

        All reads but those of the blobs are asked together: a store that refuses some of them would
        make a commit late by the sum of all. Raises `InputError` for another run (see `check_run`),
        `FencedError` if the version was closed, both before it waits for a deletion. Missing blobs
        are then uploaded again.
        """
        if manifest.anchor is not None:
            count("anchors")
        refs = [ref for payload in encoded.payloads for ref in payload.blobs]
        if self._merged:
            refs += table_blobs(manifest.payloads)
        listed: list[ObjectMeta] = []

        def list_intents() -> None:
            listed.extend(self.bucket.list_objects(keys.DELETION_INTENTS))

        checks: list[Callable[[], None]] = [self.check_run] if leader else []
        checks.append(partial(self._check_open, manifest))
        checks += [list_intents] * (LISTINGS if refs else 0)
        in_parallel(self.bucket, _call, checks)
        keep_blobs(
            self.bucket, self.run, refs, partial(self._store_again, manifest, encoded),
            listed=listed,
        )  # fmt: skip

    def _check_open(self, manifest: Manifest) -> None:
        """Raises `FencedError` if retention has closed a version."""
        if newest_retention_floor(self.bucket, self.run) > manifest.version:
            raise self.fence(manifest.version, "retention has closed this version meanwhile")

    def _store_again(self, manifest: Manifest, encoded: Encoded) -> None:
        """Uploads all blobs of a version that was just committed once more."""
        if self._encode(whole=False).delta != encoded.delta:
            raise BugError("encoding the same weights again gave different blobs")
        if encoded.anchor is not None:
            restore_anchor(self.bucket, self.run, encoded.anchor, self.staging)
        for payload in self._merged:
            store_payload(self.bucket, self.run, payload, version=manifest.version)

    def advance(self, manifest: Manifest, encoded: Encoded) -> None:
        """Makes the staged weights, which ``manifest`` commits, the baseline."""
        self.staging.finish(manifest.version, Digest.from_hex(manifest.digest), encoded.digest)
        self.baseline, self.staging = self.staging, self.baseline
        before, self._sums = self._sums, encoded.sums
        self.differing = {c.name for c in self.chunks if before.get(c) != encoded.sums[c]}
        self.schedule.count(manifest)
        self._skipped = 0
        self.head_checked = True
        if encoded.anchor is not None:
            self.remember_anchor(encoded.anchor, (self._merged or [encoded.anchor])[-1].blobs)

    def restart_from(self, mirror: Mirror) -> None:
        """Makes another mirror the baseline, and closes the one before."""
        self.baseline.close()
        self.baseline = mirror
        self.differing = set(mirror.tensors)
        self._sums = digest_chunks(self.chunks, mirror, threads=self._threads)
        self._skipped = 0
        self.head_checked = False
        self._anchor = None

    def fence(self, version: int, what: str) -> FencedError:
        """Makes the error of a publisher that may no longer write."""
        return FencedError(
            what,
            hint="only one trainer may write to a run; this one stops",
            run=self.bucket.url,
            version=version,
        )

    @property
    def _base_digest(self) -> str:
        return codec.ZERO.hex() if self.first else self.baseline.digest.hex()

    def _check_sums(self) -> None:
        """Raises `InputError` unless the baseline's bits match its digest.

        For a writer of ranges without a stated digest, the check happens when the parts are merged.
        """
        held = sum(self._sums.values(), codec.ZERO)
        whole = sum(chunk.count for chunk in self.chunks) == sum(
            tensor.count for tensor in self.run.tensors
        )
        stated = self.baseline.digest if whole else self.baseline.held
        if stated is not None and held != stated:
            raise InputError(
                "the mirror's content does not match its digest",
                hint="load it again",
                run=self.bucket.url,
                version=self.baseline.version,
            )


def _call(check: Callable[[], None]) -> None:
    check()


def create_manifest(writer: VersionWriter, manifest: Manifest, data: bytes) -> Manifest:
    """Creates the manifest; returns the one that the bucket then holds, perhaps another writer's.

    A create that failed may still have happened, so the object is read back. Raises `RetryError` if
    the store does not answer, `InputError` if an unreadable object occupies the name.
    """
    key = keys.manifest(manifest.version)
    try:
        for _ in range(2):
            try:
                if writer.bucket.create(key, data):
                    return manifest
            except RetryError:
                if (found := writer.find(manifest.version)) is not None:
                    return found
                raise
            if (found := writer.find(manifest.version)) is not None:
                return found
    except CorruptError as error:
        writer.skip_unreadable()
        raise InputError(
            f"an unreadable object has this version's name: {error.message}",
            hint="publish again: the weights become the next version with a free number",
            run=writer.bucket.url,
            version=manifest.version,
            key=key,
        ) from error
    raise RetryError("the manifest was deleted again", run=writer.bucket.url, key=key)
