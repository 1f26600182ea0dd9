"""Makes anchors after their versions are committed, so that no version waits for one.

Concurrency::

    publisher's thread                        anchor thread
      commit version N (its delta)
      baseline ⇄ staging  ──── anchor due ──▶ encode N whole from what is now the baseline, upload
      encode and commit N+1, from the           create the anchor, an object without a base
      same memory, which both only read         keep its blobs (see `gc_intents`)
      before the weights of N+2 are copied
      over that memory: wait ◀────────────────  done

An anchor is stored as a compacted delta from nothing, which readers, retention and `fsck` take like
an anchor that a manifest states. One that is missing costs readers bytes only: a publisher that is
killed first, or whose store fails, leaves the anchor to the next version. Only the anchor of
version 0, and one that replaces a version which cannot be read, are part of their manifest: nothing
else leads there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from deltawire.codec import Digest
from deltawire.errors import BugError, DeltawireError, InputError
from deltawire.store.traffic import count
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.objects import newest_retention_floor, read_compacted_delta
from deltawire.sync.chain.payloads import store_payload, table_blobs
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.publish.anchors import restore_anchor
from deltawire.sync.publish.commit import VersionWriter
from deltawire.sync.publish.encoding import Chunk, keep_blobs
from deltawire.wire import keys
from deltawire.wire.manifest import CompactedDelta, Manifest, encode_compacted
from deltawire.wire.payload import Payload, payload_fault


@dataclass(frozen=True)
class AnchorStats:
    """An anchor that was committed after its ``version``, or the ``error`` why it was not.

    ``bytes_reused`` of ``bytes_anchor`` are blobs of the anchor before, which were not uploaded
    again.

    Example::

        publisher = Publisher(bucket, run, mirror, epoch=1, on_anchor=show)

        def show(stats: AnchorStats) -> None:
            print(stats.version, stats.bytes_anchor, stats.seconds, stats.error)
    """

    version: int
    bytes_anchor: int = 0
    bytes_reused: int = 0
    seconds: float = 0.0
    error: str = ""


class LaterAnchors:
    """Makes the anchors of one writer's versions, one at a time. Not for use by several threads.

    ``on_anchor`` is called by the anchor thread. ``commit`` makes the anchor of a version from this
    writer's payload of it; by default, that payload is all of it. ``refuse`` tells other writers
    that this one has no payload of a version, before they wait for it.
    """

    def __init__(
        self,
        writer: VersionWriter,
        *,
        on_anchor: Callable[[AnchorStats], None] | None = None,
        commit: Callable[[Manifest, Payload], None] | None = None,
        refuse: Callable[[int, Exception], None] = lambda _version, _error: None,
    ) -> None:
        self._writer = writer
        self._on_anchor = on_anchor
        self._commit = commit or self.create
        self._refuse = refuse
        self._pool = WorkerThreads(1, thread_name_prefix="anchors")
        self._running: Future[AnchorStats] | None = None
        self._mirror: Mirror | None = None

    def consider(self, manifest: Manifest, sums: Mapping[Chunk, Digest]) -> None:
        """Begins the anchor of a version that was just committed, the writer's baseline, if one is
        due. While another is in progress none is: a later version has it. Ranks that must decide
        alike wait instead.
        """
        if self._running is not None:
            if not (self._running.done() or self._writer.schedule.exact):
                return
            self.wait()
        if manifest.anchor is not None or not self._writer.schedule.due(manifest.version):
            return
        self._writer.schedule.begin(manifest.version)
        self._mirror = self._writer.baseline
        self._running = self._pool.submit(self._make, manifest, self._mirror, sums)

    def leave(self, mirror: Mirror) -> None:
        """Waits until no anchor is made from the memory of ``mirror``, which is to be written."""
        if self._mirror is mirror:
            self.wait()

    def wait(self) -> None:
        """Waits until no anchor is in progress."""
        if self._running is None:
            return
        done = self._running.result()
        self._running = self._mirror = None
        self._writer.schedule.end(done.bytes_anchor if not done.error else None)

    def close(self) -> None:
        """Waits for the anchor in progress, and ends the thread."""
        self.wait()
        self._pool.shutdown()

    def create(self, manifest: Manifest, payload: Payload) -> None:
        """Stores the piece table of a version's anchor and creates the anchor.

        Raises `BugError` if it is not the version's, `InputError` if readers would refuse it.
        """
        bucket, run = self._writer.bucket, self._writer.run
        version, key = manifest.version, keys.compacted(None, manifest.version)
        if fault := payload_fault(payload, run, base_digest=None, to=manifest.digest):
            raise BugError(f"the new anchor is wrong: {fault}", run=bucket.url, key=key)
        ref = store_payload(bucket, run, payload, version=version)
        anchor = CompactedDelta(
            run=run.id,
            version=version,
            payload=ref,
            digest=manifest.digest,
            created_at=time.time(),
        )
        data = encode_compacted(anchor, signer=self._writer.signer)
        if not bucket.create(key, data):
            there = read_compacted_delta(bucket, run, None, version)
            if there is None or there.digest != manifest.digest:
                raise InputError(
                    "another object has this anchor's name",
                    hint="delete it: the next anchor is made with a later version",
                    run=bucket.url,
                    version=version,
                    key=key,
                )
        count("anchors")
        tables = table_blobs([ref])

        def again() -> None:
            store_payload(bucket, run, payload, version=version)

        keep_blobs(bucket, run, tables, again)

    def _make(
        self, manifest: Manifest, mirror: Mirror, sums: Mapping[Chunk, Digest]
    ) -> AnchorStats:
        started = time.perf_counter()
        writer = self._writer
        try:
            payload, reused = self._committed(manifest, mirror, sums)
            keep_blobs(
                writer.bucket, writer.run, payload.blobs,
                lambda: restore_anchor(writer.bucket, writer.run, payload, mirror),
            )  # fmt: skip
            writer.remember_anchor(payload)
            size = sum(ref.bytes for ref in payload.blobs)
            done = AnchorStats(manifest.version, size, reused, time.perf_counter() - started)
        except DeltawireError as error:
            done = AnchorStats(manifest.version, error=str(error))
        except BaseException as error:  # The thread's owner learns of it by the report only.
            what = f"cannot make an anchor: {type(error).__name__}: {error}"
            done = AnchorStats(manifest.version, error=str(BugError(what)))
        if self._on_anchor is not None:
            self._on_anchor(done)
        return done

    def _committed(
        self, manifest: Manifest, mirror: Mirror, sums: Mapping[Chunk, Digest]
    ) -> tuple[Payload, int]:
        """Uploads and commits an anchor; returns its payload, and the bytes reused in it."""
        writer = self._writer
        try:
            payload, reused = writer.upload_anchor(mirror, sums)
            if newest_retention_floor(writer.bucket, writer.run) > manifest.version:
                raise InputError("retention has closed the version meanwhile")
            self._commit(manifest, payload)
        except Exception as error:
            self._refuse(manifest.version, error)
            raise
        return payload, reused
