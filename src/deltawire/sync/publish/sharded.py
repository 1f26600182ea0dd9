"""One version from many ranks: each uploads its own pieces, one manifest commits all or none.

Who waits for whom::

    every rank                              rank 0, the leader
      copy own shard into staging             (the same)
      encode own chunks, upload blobs          (the same)
      create part ──────────────────────────▶ wait for all parts, check them, add up the digests
      wait for the manifest ◀──────────────── create the manifest; delete the parts
      look after own blobs (see `sweeps`)     (the same)
      baseline ⇄ staging                      (the same)

The ranks share nothing but the bucket and the name of their ``session``. A rank that dies or
differs leaves a part that is missing or does not fit; then nothing is committed, every rank's
baseline stays where it is, and a new session starts from there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, DeltawireError, FencedError, InputError, RetryError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import (
    check_signed,
    check_signer,
    check_size,
    newest_retention_floor,
    read_manifest,
    with_retries,
)
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.publish.encoding import (
    BLOB_BYTES,
    Chunk,
    chunks_of,
    digest_chunks,
    keep_blobs,
    upload_anchor,
    upload_delta,
)
from deltawire.sync.publish.parallel_copy import Copier
from deltawire.wire import keys
from deltawire.wire.coordination import Part, decode_part
from deltawire.wire.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Payload,
    add_sums,
    encode_manifest,
    payload_fault,
)
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal

LEADER = 0


class ShardPublisher:
    """One rank's share of a publisher.

    ``mirror`` holds this rank's range of each tensor at the bucket's newest version, by ``starts``
    where a range does not begin at element 0; the ranges of all ranks together must cover every
    tensor once. With ``version`` -1 in it the first `publish` makes version 0. ``session`` is the
    same on all ranks and has never been used in this run before; the epoch is as for `Publisher`.
    A session that has failed once is over: every later call raises the same error.
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
        timeout_s: float = 600.0,
        signer: Signer | None = None,
        threads: int | None = None,
        blob_bytes: int = BLOB_BYTES,
    ) -> None:
        check_signer(bucket, run, signer)
        if not 0 <= rank < ranks:
            raise InputError(f"rank {rank} of {ranks}")
        self.bucket = bucket
        self.run = run
        self.rank = rank
        self.ranks = ranks
        self.epoch = epoch
        self._session = session
        self._anchor_every = anchor_every
        self._timeout_s = timeout_s
        self._signer = signer
        self._threads = threads
        self._blob_bytes = blob_bytes
        self._baseline = mirror
        self._staging = mirror.copy()
        self._chunks = chunks_of(run, mirror)
        self._sums: dict[Chunk, Digest] = {}
        self._last_anchor: int | None = None
        if mirror.version >= 0:
            self._sums = digest_chunks(self._chunks, mirror, threads=threads)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._copier = Copier(threads)
        self._pending: Future[None] | None = None
        self._failure: BaseException | None = None
        keys.part(0, session, rank)  # A session that cannot name an object is refused now.

    @property
    def version(self) -> int:
        """The newest committed version, -1 before the first."""
        return self._baseline.version

    @property
    def digest(self) -> Digest:
        """The digest of the whole model at that version."""
        return self._baseline.digest

    def publish(self, shards: Mapping[str, Any], *, metadata: dict[str, Any] | None = None) -> int:
        """Copy this rank's ``shards`` (names to contiguous flat or shaped arrays or CPU tensors,
        as many elements as the mirror holds) and commit them in the background, together with
        the other ranks', as the next version, which is returned. The leader's metadata counts.

        Raises what the version before failed with, `InputError` for shards that are not the
        mirror's.
        """
        self.flush()
        self._stage(shards)
        version = self._baseline.version + 1
        self._pending = self._pool.submit(self._commit, version, metadata or {})
        return version

    def flush(self) -> None:
        """Wait until the version under way is committed; raises what it failed with."""
        if self._failure is not None:
            raise self._failure
        if self._pending is None:
            return
        try:
            self._pending.result()
        except BaseException as error:
            if self._pending.done():
                self._failure = error
            raise
        self._pending = None

    def close(self) -> None:
        """Wait for the version under way and end the thread."""
        try:
            if self._failure is None:
                self.flush()
        finally:
            self._pool.shutdown()
            self._copier.close()

    def _stage(self, shards: Mapping[str, Any]) -> None:
        held = self._staging.tensors
        if odd := sorted(shards.keys() ^ held.keys()):
            raise InputError(f"shards that only one of mirror and caller has: {odd[:5]}")
        dtypes = {spec.name: spec.dtype for spec in self.run.tensors}
        found = {name: codec.bits_of(shard, dtypes[name]) for name, shard in shards.items()}
        for name, bits in found.items():
            if bits.size != held[name].size:
                raise InputError(
                    f"the shard of {name} has {bits.size} elements, not {held[name].size}"
                )
        self._copier.copy((held[name], bits) for name, bits in found.items())

    def _commit(self, version: int, metadata: dict[str, Any]) -> None:
        first = self._baseline.version < 0
        due = first or (self._anchor_every > 0 and version % self._anchor_every == 0)
        delta, anchor, sums = self._upload(whole=due)
        part = Part(
            run=self.run.id,
            version=version,
            rank=self.rank,
            ranks=self.ranks,
            epoch=self.epoch,
            base_digest=codec.ZERO.hex() if first else self._baseline.digest.hex(),
            delta=delta,
            anchor=anchor,
        )
        key = keys.part(version, self._session, self.rank)
        data = seal(part, key=key, signer=self._signer)
        if not with_retries(lambda: self.bucket.create(key, data)) and (
            with_retries(lambda: self.bucket.get(key, limit=MAX_MANIFEST_BYTES)) != data
        ):
            raise InputError(
                "another rank of this number, or an earlier session of this name, was here",
                hint="give every rank its own number, and every start a session of its own",
                run=self.bucket.url,
                key=key,
            )
        if self.rank == LEADER:
            self._lead(version, metadata)
        digest = self._await_manifest(version)
        payloads = [payload for payload in (delta, anchor) if payload is not None]

        def again() -> list[Payload]:
            return [payload for payload in self._upload(whole=due)[:2] if payload is not None]

        keep_blobs(self.bucket, self.run, payloads, again)
        self._staging.version, self._staging.digest = version, digest
        self._staging.held = sum(sums.values(), codec.ZERO)
        self._baseline, self._staging = self._staging, self._baseline
        self._sums = sums

    def _upload(self, *, whole: bool) -> tuple[Payload | None, Payload | None, dict[Chunk, Digest]]:
        """This rank's part of the delta, and of the anchor if the version is stored ``whole``; and
        the digests of its chunks."""
        delta, sums = None, self._sums
        if self._baseline.version >= 0:
            delta, sums = upload_delta(
                self.bucket, self.run, self._chunks, self._baseline, self._staging, self._sums,
                threads=self._threads, blob_bytes=self._blob_bytes,
            )  # fmt: skip
        else:
            sums = digest_chunks(self._chunks, self._staging, threads=self._threads)
        if not whole:
            return delta, None, sums
        anchor = upload_anchor(
            self.bucket, self.run, self._chunks, self._staging,
            threads=self._threads, blob_bytes=self._blob_bytes,
        )  # fmt: skip
        return delta, anchor, sums

    def _lead(self, version: int, metadata: dict[str, Any]) -> None:
        manifest = merge_parts(
            self.bucket,
            self.run,
            [self._await_part(version, rank) for rank in range(self.ranks)],
            base_digest=self._baseline.digest.hex() if version else codec.ZERO.hex(),
            nonce=self._session,
            last_anchor=self._last_anchor,
            metadata=metadata,
        )
        key = keys.manifest(version)
        data = encode_manifest(manifest, signer=self._signer)
        check_size(self.bucket, manifest, data)
        # Whoever made it, what lies there now decides, and every rank reads it back.
        with_retries(lambda: self.bucket.create(key, data))

    def _await_part(self, version: int, rank: int) -> Part:
        key = keys.part(version, self._session, rank)
        data = self._await(key, f"the part of rank {rank}", version)
        check_signed(self.bucket, self.run, data, key)
        part = decode_part(
            data, version=version, rank=rank, table=self.run, run=self.bucket.url, key=key
        )
        if (part.ranks, part.epoch) != (self.ranks, self.epoch):
            raise InputError(
                f"rank {rank} counts {part.ranks} ranks and epoch {part.epoch}, the leader "
                f"{self.ranks} and {self.epoch}",
                run=self.bucket.url,
                version=version,
            )
        return part

    def _await_manifest(self, version: int) -> Digest:
        self._await(keys.manifest(version), "the manifest", version)
        found = with_retries(lambda: read_manifest(self.bucket, self.run, version))
        boundary = with_retries(lambda: newest_retention_floor(self.bucket))
        if found is None or found.nonce != self._session or boundary > version:
            raise FencedError(
                "another publisher has committed this version",
                hint="only one trainer may write to a run; this one stops",
                run=self.bucket.url,
                version=version,
            )
        self._last_anchor = found.last_anchor
        if self.rank == LEADER:
            for rank in range(self.ranks):
                with suppress(DeltawireError):  # Retention takes what is left.
                    self.bucket.delete(keys.part(version, self._session, rank))
        return Digest.from_hex(found.digest)

    def _await(self, key: str, what: str, version: int) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        while True:
            data = with_retries(lambda: self.bucket.get(key, limit=MAX_MANIFEST_BYTES))
            if data is not None:
                return data
            if time.monotonic() > deadline:
                raise RetryError(
                    f"{what} did not come within {self._timeout_s:.0f} s",
                    hint="has another rank ended? start all of them anew",
                    run=self.bucket.url,
                    version=version,
                    key=key,
                )
            time.sleep(self.bucket.poll_s)


def merge_parts(
    bucket: Bucket,
    run: Run,
    parts: list[Part],
    *,
    base_digest: str,
    nonce: str,
    last_anchor: int | None = None,
    metadata: dict[str, Any] | None = None,
) -> Manifest:
    """The manifest that commits all ``parts`` of a version, checked as a reader checks it.

    Raises `InputError` if parts overlap, leave a gap, or build on different bases.
    """
    version, first = parts[0].version, parts[0].version == 0
    if any(part.base_digest != base_digest for part in parts):
        raise InputError("the ranks build on different weights", run=bucket.url, version=version)
    delta = None if first else _merged([part.delta for part in parts])
    whole = [part.anchor for part in parts]
    anchor = _merged(whole) if any(payload is not None for payload in whole) else None
    payload = anchor if delta is None else delta
    if payload is None:
        raise InputError("the first version has no anchor", run=bucket.url, version=version)
    digest = add_sums([base_digest, *(piece.sum for piece in payload.pieces)])
    for merged, base in ((delta, base_digest), (anchor, None)):
        fault = "" if merged is None else payload_fault(merged, run, base_digest=base, to=digest)
        if fault:
            raise InputError(f"the parts of the ranks: {fault}", run=bucket.url, version=version)
    if first and digest != run.digest:
        raise InputError(
            "the first version is not the model that run.json was written for", run=bucket.url
        )
    return Manifest(
        run=run.id,
        version=version,
        base=None if first else version - 1,
        base_digest=base_digest,
        delta=delta,
        anchor=anchor,
        digest=digest,
        last_anchor=last_anchor if anchor is None else version,
        epoch=parts[0].epoch,
        nonce=nonce,
        created_at=time.time(),
        metadata=metadata or {},
    )


def _merged(payloads: list[Payload | None]) -> Payload:
    """One payload of many: blobs behind each other, pieces pointing at them."""
    merged = Payload(blobs=[], pieces=[], changed=0)
    changed = 0
    for payload in payloads:
        if payload is None:
            raise CorruptError("a part lacks the payload that the others have")
        shift = len(merged.blobs)
        merged.blobs.extend(payload.blobs)
        merged.pieces.extend(
            msgspec.structs.replace(piece, blob=piece.blob + shift) for piece in payload.pieces
        )
        changed += payload.changed
    return msgspec.structs.replace(merged, changed=changed)
