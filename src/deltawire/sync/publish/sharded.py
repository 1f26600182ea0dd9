"""Publishes one version from many ranks: each uploads its own pieces, one manifest commits all.

Concurrency::

    every rank                              rank 0, the leader
      copy own shard into staging             (the same)
      encode own chunks, upload blobs         (the same)
      create part ──────────────────────────▶ list the parts, read new ones many at a time
                                              merge and check them
      wait for the manifest ◀──────────────── create the manifest
      confirm own blobs (see `gc_intents`)    (the same)
      baseline ⇄ staging                      (the same); delete the parts in another thread
      if an anchor is due, in another thread: the same for the anchor (see `later_anchors`)

No request is made once a rank in series: a commit of 2,000 ranks takes the leader two pages of a
listing and 2,000 reads, `REQUESTS` of them at once. Ranks that wait poll so rarely that all of them
together stay at `WAITING_REQUESTS_PER_S`.

The ranks share only the bucket and the name of their ``session``. If a rank dies, or its part does
not fit the others, nothing is committed, no rank's baseline moves, and a new session starts from
there. A rank that fails creates a refusal, so that no other rank waits for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, DeltawireError, InputError, ResyncError, RetryError
from deltawire.store import Bucket, in_parallel
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.evidence import read_again, require_agreed
from deltawire.sync.chain.objects import check_signed
from deltawire.sync.chain.retention import GRACE_S
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.publish.anchor_schedule import AnchorSchedule
from deltawire.sync.publish.announcement import Announcer, announcing
from deltawire.sync.publish.commit import (
    CommitStats,
    VersionWriter,
    create_manifest,
)
from deltawire.sync.publish.commit_thread import CommitThread, StagedVersion
from deltawire.sync.publish.compaction import CompactionThread
from deltawire.sync.publish.encoding import BLOB_BYTES
from deltawire.sync.publish.later_anchors import AnchorStats, LaterAnchors
from deltawire.sync.publish.merging import merge_payloads
from deltawire.sync.publish.offload import offloaded_mirror
from deltawire.sync.publish.outage import Outage
from deltawire.sync.publish.parallel_copy import Copier
from deltawire.sync.publish.patience import Patience
from deltawire.sync.publish.retention_thread import RetentionThread
from deltawire.wire import keys
from deltawire.wire.coordination import (
    MAX_REASON,
    MAX_REFUSAL_BYTES,
    Part,
    Refusal,
    decode_part,
    decode_refusal,
)
from deltawire.wire.manifest import MAX_MANIFEST_BYTES, Manifest
from deltawire.wire.payload import MAX_PIECES, Payload
from deltawire.wire.run import Run, count_chunks
from deltawire.wire.seal import Signer, seal

LEADER = 0

PartKey = Callable[[int, str, int], str]
"""Maps version, session and rank to the key of a part."""

WAITING_REQUESTS_PER_S = 2000.0
"""The most requests a second of all ranks that wait for a manifest: a third of what S3 states for
one prefix. Each poll makes two."""

FIRST_PAUSE_SHARE = 0.1
"""The leader's first pause, as a share of the bucket's polling interval; pauses double up to it."""

JITTER = 0.25
"""Pauses of waiting ranks vary by up to this share, so that they do not poll at the same time."""


def load_ranges(
    bucket: Bucket,
    run: Run,
    ranges: Mapping[str, tuple[int, int]],
    *,
    at: int,
    snapshot_dir: Path | str | None = None,
) -> Mirror:
    """Loads flat ranges of tensors, each (first element, count), of version ``at`` into a mirror
    for a `ShardPublisher` of these ranges.

    Ranges are whole rows. With ``snapshot_dir`` the mirror, and the publisher's copy of it, lie in
    files in that folder (see `offload`). Raises `CorruptError` if the version cannot be read,
    `InputError` if the folder cannot be used.

    Example::

        ranges = {name: (shard.start, shard.bits.numel()) for name, shard in shards.items()}
        mirror = load_ranges(bucket, run, ranges, at=newest_version(bucket))
    """
    specs = {spec.name: spec for spec in run.tensors}
    rows: dict[str, tuple[int, int] | None] = {}
    for name, (start, count) in ranges.items():
        spec = specs[name]
        width = spec.count // spec.shape[0] if spec.shape else 1
        rows[name] = None if count == spec.count else (start // width, (start + count) // width)
    if snapshot_dir is not None:
        offloaded = offloaded_mirror(run, snapshot_dir, rows)
        load_mirror(bucket, run, at=at, into=offloaded)
        offloaded.narrow(ranges)
        return offloaded
    loaded = load_mirror(bucket, run, at=at, wanted=rows)
    tensors = {}
    for name, (start, count) in ranges.items():
        bits = loaded.find(name, start, count)
        assert bits is not None
        tensors[name] = bits.copy()
    starts = {name: start for name, (start, _) in ranges.items() if start}
    return Mirror(tensors, loaded.version, loaded.digest, starts)


class ShardPublisher:
    """Publishes one rank's ranges of the tensors.

    ``mirror`` holds this rank's range of each tensor at the bucket's newest version, by ``starts``
    where a range does not begin at element 0; the ranges of all ranks together must cover every
    tensor once. With version -1 in it the first `publish` makes version 0. ``session`` is the same
    on all ranks and must be new in this run; ``epoch`` is as for `Publisher`. After one failure the
    session is over: every later call raises the same error. On the leader, ``on_commit`` is called
    after each commit, in the publisher's thread, ``on_anchor`` after each anchor, in another, and
    compacted deltas are made over ``compaction_strides``, and old versions pruned by ``retain`` and
    ``grace_s`` as for `Publisher`. So is ``max_outage``, but the next `publish` waits for the
    version: ranks that did not all know whether it is committed could not replace it. At the
    interpreter's end each rank waits a limited time (see `commit_thread`), without asking others.

    Example::

        publisher = ShardPublisher(
            bucket, run, shard_mirror, rank=rank, ranks=world, epoch=0, session="start-1"
        )
        publisher.publish(local_shards)
        publisher.close()
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        mirror: Mirror,
        *,
        rank: int,
        ranks: int,
        epoch: int,
        session: str,
        anchor_every: int = 50,
        compaction_strides: Sequence[int] = (),
        timeout_s: float = 600.0,
        signer: Signer | None = None,
        threads: int | None = None,
        blob_bytes: int = BLOB_BYTES,
        on_commit: Callable[[CommitStats], None] | None = None,
        on_anchor: Callable[[AnchorStats], None] | None = None,
        max_outage: float | None = 0.0,
        announce: bool = False,
        retain: int = 0,
        grace_s: float = GRACE_S,
    ) -> None:
        if not 0 <= rank < ranks:
            raise InputError(f"rank {rank} of {ranks}", hint="ranks count from 0")
        self.outage = Outage(bucket.url, max_outage)
        self._writer = VersionWriter(
            retrying := self.outage.over(bucket),
            run,
            mirror,
            epoch=epoch,
            schedule=AnchorSchedule(anchor_every, exact=True),
            signer=signer,
            threads=threads,
            blob_bytes=blob_bytes,
        )
        self.bucket = self._writer.bucket
        self.run = run
        self.rank = rank
        self.ranks = ranks
        self._check_pieces()
        self._session = session
        self._timeout_s = timeout_s
        self._on_commit = on_commit
        self._compaction = CompactionThread(
            retrying,
            run,
            compaction_strides if rank == LEADER else (),
            signer=signer,
            threads=threads,
            blob_bytes=blob_bytes,
        )
        self._on_anchor = on_anchor
        self._retention = RetentionThread(
            retrying, run, retain=retain, grace_s=grace_s, signer=signer
        )
        self._anchors = LaterAnchors(
            self._writer,
            on_anchor=self._after_anchor if rank == LEADER else None,
            commit=self._commit_anchor,
            refuse=self._refuse,
        )
        self._submitted = -1
        self._commits = CommitThread(self.bucket.url, "shards", self.outage, ranks=True)
        announcer = announce and rank == LEADER
        self._announcer = Announcer(self.bucket, run, epoch, signer) if announcer else None
        self._cleaner = WorkerThreads(1, thread_name_prefix="parts")
        self._copier = Copier(threads)
        self._failure: BaseException | None = None
        keys.part(0, session, rank)  # Refuse a session that cannot be part of an object's name now.

    def _check_pieces(self) -> None:
        """Raises `InputError` if a version of all ranks could exceed what readers accept.

        Every range that begins inside a chunk divides a piece in two; assume that the other ranks
        have as many of these as this one.
        """
        divided = sum(chunk.start % self.run.chunk > 0 for chunk in self._writer.chunks)
        most = count_chunks(self.run.tensors, self.run.chunk) + self.ranks * divided
        if most > MAX_PIECES:
            raise InputError(
                f"a version from {self.ranks} ranks may have {most} pieces; readers accept "
                f"{MAX_PIECES}",
                hint="give each rank whole tensors, or ranges that begin at chunk borders",
                run=self.bucket.url,
            )

    @property
    def version(self) -> int:
        """The newest committed version, -1 before the first."""
        return self._writer.baseline.version

    @property
    def digest(self) -> Digest:
        """The digest of the whole model at that version."""
        return self._writer.baseline.digest

    @property
    def held(self) -> Mirror:
        """The tensors of the newest committed version that this process holds. Do not write."""
        return self._writer.baseline

    @property
    def staged(self) -> Mirror:
        """The memory that the next `publish` copies weights to. It holds them until the `publish`
        after the next. Read this after `flush`."""
        return self._writer.staging

    @property
    def committing(self) -> Future[None] | None:
        """The commit of the version in progress, for other threads to wait for; None without
        one."""
        return self._commits.pending

    @property
    def next_version(self) -> int:
        """The version number of the next `publish`, the same on all ranks unless an unreadable
        object occupies it meanwhile; see `Publisher.next_version`.
        """
        if self._commits.pending is not None:
            return max(self._submitted + 1, self._writer.next_version)
        return self._writer.next_version

    def skip_to(self, version: int) -> None:
        """Makes ``version`` the number of the next `publish`, for a run that has the numbers of
        another one. First waits for the version in progress and raises its error."""
        self.flush()
        self._writer.skip_to(version)

    def publish(
        self,
        shards: Mapping[str, Any],
        *,
        partial: bool = False,
        metadata: dict[str, Any] | None = None,
        wait: bool = False,
    ) -> int:
        """Copies this rank's ``shards`` and commits them with the other ranks' as the next version.

        ``shards`` maps names to contiguous flat or shaped arrays or CPU tensors, of as many
        elements as the mirror holds. With ``partial``, shards that are left out keep their bits at
        no cost. Returns the version, which is committed in the background with the leader's
        ``metadata``; with ``wait``, before this returns. Raises the error of the previous version,
        and `InputError` for shards that do not match the mirror, or too much metadata.
        """
        started = time.perf_counter()
        checked = self._writer.check_metadata(metadata)
        self._commits.check_process()
        self.flush()
        self._commits.forget()
        self._submitted = version = self._writer.next_version
        with announcing(self._announcer, version, checked):
            self._stage(shards, partial=partial)
        blocked_ms = (time.perf_counter() - started) * 1e3
        step = StagedVersion(version)
        self._commits.submit(step, lambda: self._commit(step, checked, blocked_ms))
        if wait:
            self.flush()
        return version

    def wait_while_answered(self) -> bool:
        """Waits for the version in progress while the store answers; returns whether it is done."""
        return self._commits.wait_while_answered()

    def flush(self) -> None:
        """Waits until the version in progress is committed; raises its error."""
        if self._failure is not None:
            raise self._failure
        try:
            self._commits.wait()
        except BaseException as error:
            if self._commits.pending is None:
                self._failure = error
            raise

    def raise_failure(self) -> None:
        """Raises the error of a version that could not be committed, as `flush` does, but does not
        wait for one that is in progress. A caller that waits for readers of the version calls it.
        """
        if (pending := self._commits.pending) is not None and pending.done():
            self.flush()

    def close(self) -> None:
        """Waits for the version in progress and ends the threads."""
        if self._commits.inherited:
            return
        try:
            self._commits.close()
        finally:
            if self._announcer is not None:
                self._announcer.close()
            self._anchors.close()
            self._retention.close()
            self._cleaner.shutdown()
            self._copier.close()
            self._compaction.close()
            self._writer.close()

    def _stage(self, shards: Mapping[str, Any], *, partial: bool) -> None:
        held = self._writer.staging.tensors
        rest = held.keys() - shards.keys() if partial and not self._writer.first else set[str]()
        if odd := sorted((shards.keys() | rest) ^ held.keys()):
            raise InputError(f"the shards are not the mirror's; only one of the two has {odd[:5]}")
        dtypes = {spec.name: spec.dtype for spec in self.run.tensors}
        found = {name: codec.bits_of(shard, dtypes[name]) for name, shard in shards.items()}
        for name, bits in found.items():
            if bits.size != held[name].size:
                raise InputError(
                    f"the shard of {name} has {bits.size} elements, the mirror {held[name].size}"
                )
        kept, differing = self._writer.baseline.tensors, self._writer.differing
        found |= {name: kept[name] for name in rest if name in differing}
        differing.difference_update(rest)
        differing.update(shards)
        self._anchors.leave(self._writer.staging)
        self._copier.copy(
            ((held[name], bits) for name, bits in found.items()),
            touched=self._writer.touched,
        )

    def _commit(self, step: StagedVersion, metadata: dict[str, Any], blocked_ms: float) -> None:
        try:
            self._commit_version(step, metadata, blocked_ms)
        except RetryError:
            raise
        except Exception as error:
            self._refuse(step.version, error)
            raise

    def _commit_version(
        self, step: StagedVersion, metadata: dict[str, Any], blocked_ms: float
    ) -> None:
        version = step.version
        started = time.perf_counter()
        self._writer.check_head()
        if self._writer.whole:
            self._anchors.wait()
        encoded = self._writer.encode()
        encoded_at = time.perf_counter()
        part = self._writer.part(encoded, rank=self.rank, ranks=self.ranks)
        store = partial(self._create_part, keys.part(version, self._session, self.rank), part)
        store()
        changed = encoded.changed
        if self.rank == LEADER:
            parts = self._await_parts(version, keys.part, store)
            changed = sum(part.changed for part in parts)
            manifest, data = self._writer.merge(parts, nonce=self._session, metadata=metadata)
            manifest = self._check_mine(create_manifest(self._writer, manifest, data))
        else:
            manifest = self._await_manifest(version, store)
        self._writer.confirm(manifest, encoded, leader=self.rank == LEADER)
        self._writer.advance(manifest, encoded)
        step.committed = True
        self._anchors.consider(manifest, encoded.sums)
        if self.rank != LEADER:
            return
        self._cleaner.submit(self._delete_parts, version, keys.part)
        self._compaction.wake(version)
        if self._on_commit is not None:
            self._on_commit(
                CommitStats.of(
                    manifest,
                    self.run,
                    changed=changed,
                    blocked_ms=blocked_ms,
                    encode_ms=(encoded_at - started) * 1e3,
                    upload_ms=(time.perf_counter() - encoded_at) * 1e3,
                    compaction_error=str(self._compaction.error or ""),
                    bytes_reused=self._writer.bytes_reused,
                )
            )

    def _refuse(self, version: int, error: Exception) -> None:
        """Tells the other ranks at once why this one fails, unless one of them already refused."""
        key = keys.refusal(version, self._session)
        reason = error.message if isinstance(error, DeltawireError) else str(error)
        refusal = Refusal(
            run=self.run.id,
            version=version,
            rank=self.rank,
            reason=f"{type(error).__name__}: {reason}"[:MAX_REASON],
        )
        with suppress(DeltawireError):
            self.bucket.create(key, seal(refusal, key=key, signer=self._writer.signer))

    def _check_refusal(self, version: int) -> None:
        """Raises `ResyncError` if another rank refused to take part in this version.

        Raises `FencedError` instead if another publisher has taken the run, which that rank may
        have noticed first.
        """
        key, url = keys.refusal(version, self._session), self.bucket.url
        try:
            data = self.bucket.get(key, limit=MAX_REFUSAL_BYTES)
            if data is None:
                return
            check_signed(self.bucket, self.run, data, key)
            found = decode_refusal(data, version=version, table=self.run, run=url, key=key)
        except CorruptError:  # Ignore a damaged refusal; the wait is limited anyway.
            return
        manifest = self._writer.find(version)
        if manifest is not None and manifest.nonce != self._session:
            raise self._writer.fence(version, "another publisher has committed this version")
        raise ResyncError(
            f"rank {found.rank} refused this version: {found.reason!r}",
            hint="see that rank's error, then start all ranks again",
            run=url,
            version=version,
        )

    def _commit_anchor(self, manifest: Manifest, payload: Payload) -> None:
        """Makes the anchor of a committed version from all ranks' parts of it; called by the anchor
        thread of each rank.
        """
        version = manifest.version
        part = self._writer.anchor_part(manifest, payload, rank=self.rank, ranks=self.ranks)
        store = partial(
            self._create_part, keys.anchor_part(version, self._session, self.rank), part
        )
        store()
        if self.rank == LEADER:
            parts = self._await_parts(version, keys.anchor_part, store)
            refs = [one.anchor for one in parts]
            self._anchors.create(manifest, merge_payloads(self.bucket, self.run, refs, {}))
            self._delete_parts(version, keys.anchor_part)
        else:
            self._await_anchor(version, store)

    def _after_anchor(self, stats: AnchorStats) -> None:
        if not stats.error:
            self._retention.wake(stats.version)
        if self._on_anchor is not None:
            self._on_anchor(stats)

    def _await_anchor(self, version: int, store: Callable[[], None]) -> None:
        key = keys.compacted(None, version)
        patience = Patience(self.bucket.url, self._timeout_s, store)
        while not self.bucket.exists(key):
            self._check_refusal(version)
            if patience.over:
                raise self._too_late("the anchor", version, key)
            time.sleep(waiting_pause_s(self.bucket.poll_s, self.ranks, random.random()))

    def _create_part(self, key: str, part: Part) -> None:
        data = seal(part, key=key, signer=self._writer.signer)
        if self.bucket.create(key, data):
            return
        found = require_agreed(self.bucket, key, limit=MAX_MANIFEST_BYTES, so="nothing was created")
        # If the answer to the create was lost, the leader may have read and deleted the part since.
        if found not in (data, None):
            raise InputError(
                "another rank has this number, or an earlier session had this name",
                hint="give every rank a unique number, and every start a unique session",
                run=self.bucket.url,
                key=key,
            )

    def _await_parts(self, version: int, key_of: PartKey, store: Callable[[], None]) -> list[Part]:
        """Returns all ranks' parts in order, read as listings show them.

        Raises `RetryError` if one is missing for too long, `ResyncError` if a rank refused.
        """
        prefix = keys.parts_of(version, self._session)
        names = [key_of(version, self._session, rank) for rank in range(self.ranks)]
        found: dict[int, Part] = {}
        patience = Patience(self.bucket.url, self._timeout_s, store)
        pause_s = FIRST_PAUSE_SHARE * self.bucket.poll_s
        while True:
            listed = set(self.bucket.list(prefix))
            new = [rank for rank, key in enumerate(names) if rank not in found and key in listed]
            parts = in_parallel(
                self.bucket, lambda rank: self._read_part(version, rank, names[rank]), new
            )
            found |= {part.rank: part for part in parts if part is not None}
            if len(found) == self.ranks:
                return [found[rank] for rank in range(self.ranks)]
            if keys.refusal(version, self._session) in listed:
                self._check_refusal(version)
            if patience.over:
                missing = min(set(range(self.ranks)) - found.keys())
                raise self._too_late(f"the part of rank {missing}", version, names[missing])
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self.bucket.poll_s)

    def _read_part(self, version: int, rank: int, key: str) -> Part | None:
        url, epoch = self.bucket.url, self._writer.epoch

        def read() -> Part | None:
            data = self.bucket.get(key, limit=MAX_MANIFEST_BYTES)
            if data is None:
                return None
            check_signed(self.bucket, self.run, data, key)
            return decode_part(data, version=version, rank=rank, table=self.run, run=url, key=key)

        part = read_again(self.bucket, key, read)  # One damaged answer must not end all ranks.
        if part is not None and (part.ranks, part.epoch) != (self.ranks, epoch):
            raise InputError(
                f"rank {rank} counts {part.ranks} ranks and epoch {part.epoch}, the leader "
                f"{self.ranks} and {epoch}",
                hint="start all ranks with the same settings",
                run=url,
                version=version,
            )
        return part

    def _await_manifest(self, version: int, store: Callable[[], None]) -> Manifest:
        patience = Patience(self.bucket.url, self._timeout_s, store)
        while (found := self._writer.find(version)) is None:
            self._check_refusal(version)
            if patience.over:
                raise self._too_late("the manifest", version, keys.manifest(version))
            time.sleep(waiting_pause_s(self.bucket.poll_s, self.ranks, random.random()))
        return self._check_mine(found)

    def _check_mine(self, found: Manifest) -> Manifest:
        if found.nonce != self._session:
            raise self._writer.fence(found.version, "another publisher has committed this version")
        return found

    def _delete_parts(self, version: int, key_of: PartKey) -> None:
        def delete(rank: int) -> None:
            with suppress(DeltawireError):  # Retention removes those that remain.
                self.bucket.delete(key_of(version, self._session, rank))

        in_parallel(self.bucket, delete, range(self.ranks))

    def _too_late(self, what: str, version: int, key: str) -> RetryError:
        return RetryError(
            f"{what} did not appear within {self._timeout_s:.0f} s",
            hint="did another rank end? start all ranks again",
            run=self.bucket.url,
            version=version,
            key=key,
        )


def waiting_pause_s(poll_s: float, ranks: int, draw: float) -> float:
    """Returns the pause of a rank that waits for a manifest; ``draw`` is uniform in [0, 1].

    It is the bucket's polling interval, or longer if ``ranks`` ranks would then exceed
    `WAITING_REQUESTS_PER_S`, varied by `JITTER`.
    """
    return max(poll_s, 2 * ranks / WAITING_REQUESTS_PER_S) * (1 - JITTER + 2 * JITTER * draw)
