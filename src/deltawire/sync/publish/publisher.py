"""Publishes versions of one model from one process, each committed by its manifest.

Concurrency::

    trainer ── publish(weights): copy into the staging buffers ──▶ returns
                                    │ (waits here while the version before is under way)
    background thread               ▼
        encode against the baseline, digest ▶ blobs ▶ manifest (create-if-absent)
                                                                │ committed
        baseline ⇄ staging, on_commit(stats) ◀──────────────────┤
    anchor thread: store it whole if due (see `later_anchors`) ◀┤
    compaction thread: compact what is due (see `compaction`) ◀─┘

`commit` describes the steps from encoding to baseline; `sharded` does the same with many ranks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, DeltawireError, FencedError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.retention import GRACE_S
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Bits, Mirror
from deltawire.sync.publish.anchor_schedule import AnchorSchedule
from deltawire.sync.publish.announcement import Announcer, announcing
from deltawire.sync.publish.commit import (
    CommitStats,
    Encoded,
    VersionWriter,
    create_manifest,
)
from deltawire.sync.publish.commit_thread import CommittedLateError, CommitThread, StagedVersion
from deltawire.sync.publish.compaction import COMPACTION_STRIDES, CompactionThread
from deltawire.sync.publish.encoding import BLOB_BYTES
from deltawire.sync.publish.given_tensors import check_mapping, memory_key
from deltawire.sync.publish.later_anchors import AnchorStats, LaterAnchors
from deltawire.sync.publish.lazy_tensor import LazyTensor
from deltawire.sync.publish.outage import Outage
from deltawire.sync.publish.parallel_copy import Copier
from deltawire.sync.publish.retention_thread import RetentionThread
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import ModelFile, Run, TensorSpec
from deltawire.wire.seal import Signer


@dataclass
class _Step(StagedVersion):
    """Staged weights with what their manifest states."""

    metadata: dict[str, Any]
    blocked_ms: float
    files: list[ModelFile] | None = None
    expected: Digest | None = None


@dataclass(frozen=True)
class _Attempt:
    """A commit that has not been answered yet."""

    step: _Step
    manifest: Manifest
    encoded: Encoded


class Publisher:
    """Commits versions of one model to one run.

    ``mirror`` holds the bucket's newest version; the publisher takes ownership of it. If it is at
    version -1, the run has no version yet and the first `publish` makes version 0, an anchor.
    ``epoch`` must exceed that of every existing manifest. An anchor is made every ``anchor_every``
    versions, and when the deltas since the last anchor exceed ``anchor_share`` times its bytes; it
    follows its version, and ``on_anchor`` is then called in another thread.
    ``threads`` copy and encode; blobs are closed at ``blob_bytes``. ``newest`` is the run's newest
    version if it can no longer be loaded and ``mirror`` holds an older one. Tensors named in
    ``frozen`` are not expected to change: anchors list their blobs again instead of uploading them.
    It is only a hint, and needed only for version 0.

    If the store does not answer, the next call raises `RetryError`. With ``max_outage``, in
    seconds, publishing goes on for that long (None is no limit): the version is tried again, and
    the next `publish` supersedes it. ``outage`` has the figures, and a warning is logged once a
    minute.

    With ``retain``, the newest ``retain`` versions stay readable, and older ones are pruned after
    each anchor, ``grace_s`` seconds later (see `prune`); 0 keeps all.

    Use it as a context, or close it. If the interpreter ends without that, or SIGTERM comes and the
    program does not handle it, the last version is waited for (see `interpreter_exit`). Not for use
    by several threads at once, nor in a forked child.

    Example::

        with open_publisher(bucket, model.state_dict()) as publisher:
            for step in range(1000):
                train(model)
                publisher.publish(model.state_dict())
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        mirror: Mirror,
        *,
        epoch: int,
        anchor_every: int = 50,
        anchor_share: float = 0.0,
        compaction_strides: Sequence[int] = COMPACTION_STRIDES,
        signer: Signer | None = None,
        threads: int | None = None,
        blob_bytes: int = BLOB_BYTES,
        on_commit: Callable[[CommitStats], None] | None = None,
        on_anchor: Callable[[AnchorStats], None] | None = None,
        newest: int = -1,
        frozen: Collection[str] = (),
        max_outage: float | None = 0.0,
        announce: bool = False,
        retain: int = 0,
        grace_s: float = GRACE_S,
    ) -> None:
        self.outage = Outage(bucket.url, max_outage)
        retrying = self.outage.over(bucket)
        self._writer = VersionWriter(
            retrying,
            run,
            mirror,
            epoch=epoch,
            schedule=AnchorSchedule(anchor_every, anchor_share),
            signer=signer,
            threads=threads,
            blob_bytes=blob_bytes,
            newest=newest,
            frozen=frozen,
        )
        self.bucket = self._writer.bucket
        self.run = run
        self._on_commit = on_commit
        self._on_anchor = on_anchor
        self._anchors = LaterAnchors(self._writer, on_anchor=self._after_anchor)
        self._retention = RetentionThread(
            retrying, run, retain=retain, grace_s=grace_s, signer=signer
        )
        self._commits = CommitThread(self.bucket.url, "publisher", self.outage)
        self._announcer = Announcer(self.bucket, run, epoch, signer) if announce else None
        self._copier = Copier(threads)
        self._submitted = -1
        self._fenced: FencedError | None = None
        self._nonces: set[str] = set()
        """Identifies the manifests that this publisher tried to create for the next version."""
        self._unanswered: _Attempt | None = None
        self.compaction = CompactionThread(
            retrying,
            run,
            compaction_strides,
            signer=signer,
            threads=threads,
            blob_bytes=blob_bytes,
        )

    @property
    def epoch(self) -> int:
        """The epoch that this publisher writes under."""
        return self._writer.epoch

    @property
    def version(self) -> int:
        """The newest committed version, -1 before the first."""
        return self._writer.baseline.version

    @property
    def digest(self) -> Digest:
        """The digest of the newest committed version."""
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
        """The version number of the next `publish`. It may be more than one above the newest
        version: numbers that unreadable objects occupy are skipped.
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
        tensors: Mapping[str, Any],
        *,
        partial: bool = False,
        metadata: dict[str, Any] | None = None,
        files: list[ModelFile] | None = None,
        expected: Digest | None = None,
        wait: bool = False,
    ) -> int:
        """Copies ``tensors``, commits them in the background, and returns their version number;
        with ``wait``, once they are committed.

        ``tensors`` maps names to contiguous arrays or CPU tensors of the run's shapes and dtypes;
        of tied ones, any name or all. With ``partial``, tensors that are left out keep their bits
        at no cost. First waits for the previous version and raises its error: `FencedError` if
        another publisher has taken the run, `RetryError` or `InputError` from the store. Raises
        `InputError` if the tensors are not the run's, or the ``metadata``, which the manifest
        carries for the application, is too large.

        ``files`` are the other files of the model's directory, already stored as blobs, if they
        differ from those of run.json. Weights whose digest is not ``expected`` are not committed;
        pass it for files that another process may be writing.
        """
        started = time.perf_counter()
        check_mapping(tensors)
        checked = self._writer.check_metadata(metadata)
        superseding = self._supersede()
        self._anchors.leave(self._writer.staging)
        pairs = self._pairs(tensors, partial=partial, superseding=superseding)
        self._commits.forget()
        version = self._submitted = self._writer.next_version
        with announcing(self._announcer, version, checked):
            self._copier.copy(pairs, touched=self._writer.touched)
        blocked_ms = (time.perf_counter() - started) * 1e3
        step = _Step(version, checked, blocked_ms, files, expected)
        self._commits.submit(step, lambda: self._commit(step))
        if wait:
            self.flush()
        return version

    def _supersede(self) -> bool:
        """Waits for the previous version; returns whether it was given up and is superseded."""
        if self._fenced is not None:
            self.flush()
        if self._commits.supersede():
            self.settle()
            return False
        # If the bucket has it after all, the next attempt finds its nonce and builds on it.
        self._unanswered = None
        return True

    def holds(self, tensors: Mapping[str, Any]) -> bool:
        """Returns whether the newest version has the bits of ``tensors``, which may be some of the
        run's.

        Waits for the version in progress and raises its error.
        """
        self.flush()
        self.settle()
        specs = {spec.name: spec for spec in self.run.tensors}
        held = self._writer.baseline.tensors
        for name, value in tensors.items():
            stored = self.run.aliases.get(name, name)
            if stored not in specs:
                raise InputError(f"the run has no tensor {name[:120]!r}", run=self.bucket.url)
            if not np.array_equal(_loaded(self._bits(specs[stored], value)), held[stored]):
                return False
            self._writer.baseline.touched(held[stored].nbytes)
        return self.version >= 0

    def flush(self) -> None:
        """Waits until the version in progress is committed; raises its error."""
        if self._fenced is not None:
            self._commits.pending = None
            raise self._fenced
        self._commits.wait()

    def raise_failure(self) -> None:
        """Raises the error of a version that could not be committed, as `flush` does, but does not
        wait for one that is in progress. A caller that waits for readers of the version calls it.
        """
        if (pending := self._commits.pending) is not None and pending.done():
            self.flush()

    def wait_for_anchor(self) -> None:
        """Waits until the version in progress is committed, as `flush` does, and until no anchor is
        in progress.
        """
        self.flush()
        self._anchors.wait()

    def settle(self) -> None:
        """Determines whether an unanswered commit took place, and counts it if so.

        `publish` does this first. Raises `FencedError` if another publisher has taken the run.
        """
        attempt = self._unanswered
        if attempt is None:
            return
        try:
            found = self._writer.find(attempt.manifest.version)
            if found is not None:
                self._check_mine(found, attempt.manifest)
                self._writer.confirm(attempt.manifest, attempt.encoded)
        except FencedError as error:
            self._fenced = error
            raise
        if found is not None:
            self._advance(attempt, 0.0, 0.0)
        self._unanswered = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the publisher; an error that is under way is not replaced by that of a version."""
        try:
            self.close()
        except DeltawireError as failure:
            if error is None:
                raise
            error.add_note(f"the last version was not committed: {failure}")

    def close(self) -> None:
        """Waits for the version in progress, and the anchor and compactions that are due, and ends
        the threads. In a forked child does nothing.
        """
        if self._commits.inherited:
            return
        try:
            self._commits.close()
        finally:
            if self._announcer is not None:
                self._announcer.close()
            self._anchors.close()
            self._retention.close()
            self._copier.close()
            self.compaction.close()
            self._writer.close()

    def _pairs(
        self, tensors: Mapping[str, Any], *, partial: bool, superseding: bool = False
    ) -> list[tuple[Bits, Bits | LazyTensor]]:
        """Checks all tensors and pairs each with its place in the staging buffers. Tensors left out
        are paired with the baseline's bits if the staged ones may differ, and keep their staged
        bits if these are of a version that is superseded.
        """
        staging, differing = self._writer.staging, self._writer.differing
        given: dict[str, Any] = {}
        tied: list[tuple[str, Any]] = []
        for name, value in tensors.items():
            stored = self.run.aliases.get(name, name)
            first = given.setdefault(stored, value)
            if first is value:
                continue
            memory = memory_key(value)
            if memory is None or memory != memory_key(first):  # Other memory, maybe the same bits.
                tied.append((stored, value))
        rest = staging.tensors.keys() - given.keys() if partial and not self._writer.first else ()
        if given.keys() | set(rest) != staging.tensors.keys():
            odd = sorted(given.keys() ^ staging.tensors.keys())
            raise InputError(f"the tensors are not the run's; only one of the two has {odd[:5]}")
        specs = {spec.name: spec for spec in self.run.tensors}
        found = {name: self._bits(specs[name], value) for name, value in given.items()}
        for name, value in tied:
            if not np.array_equal(_loaded(self._bits(specs[name], value)), _loaded(found[name])):
                raise InputError(
                    f"tensor {name} is tied to another in this run, and the two differ",
                    hint="start a new run with these tensors untied, and publish to that",
                    run=self.bucket.url,
                )
        kept = self._writer.baseline.tensors
        if not superseding:
            found |= {name: kept[name] for name in rest if name in differing}
            differing.difference_update(rest)
        differing.update(given)
        return [(self._writer.staged(name), bits) for name, bits in found.items()]

    def _bits(self, spec: TensorSpec, value: Any) -> Bits | LazyTensor:
        try:
            if isinstance(value, LazyTensor):
                if value.spec.dtype != spec.dtype:
                    raise InputError(f"the file holds {value.spec.dtype}, not {spec.dtype}")
                bits: Bits | LazyTensor = value
            else:
                bits = codec.bits_of(value, spec.dtype)
        except InputError as error:
            raise InputError(
                f"tensor {spec.name}: {error.message}", hint=error.hint, run=self.bucket.url
            ) from error
        if (shape := tuple(value.shape)) != spec.shape:
            raise InputError(f"tensor {spec.name} has shape {shape}, the run's is {spec.shape}")
        return bits

    def _commit(self, step: _Step) -> None:
        try:
            if self._unanswered is not None:
                self.settle()
            if not step.committed:
                step.version = self._writer.next_version  # Another after a late commit.
                self._commit_step(step)
        except FencedError as error:
            self._fenced = error
            raise

    def _commit_step(self, step: _Step) -> None:
        started = time.perf_counter()
        self._writer.check_head()
        if self._writer.whole:
            self._anchors.wait()
        encoded = self._writer.encode()
        if step.expected is not None and encoded.digest != step.expected:
            raise InputError(
                "the weights changed while they were being copied",
                hint="publish them once they no longer change",
                run=self.bucket.url,
                version=step.version,
            )
        manifest, data = self._writer.merge(
            [self._writer.part(encoded, rank=0, ranks=1)],
            nonce=secrets.token_hex(16),
            metadata=step.metadata,
            files=step.files,
        )
        encoded_at = time.perf_counter()
        # Recorded before the first attempt, removed once its outcome is known.
        self._nonces.add(manifest.nonce)
        self._unanswered = attempt = _Attempt(step, manifest, encoded)
        try:
            created = create_manifest(self._writer, manifest, data)
        except InputError as error:
            if isinstance(error.__cause__, CorruptError):
                self._unanswered = None  # Another object has the name, so this one was not stored.
            raise
        self._check_mine(created, manifest)
        self._writer.confirm(manifest, encoded)
        self._advance(attempt, encoded_at - started, time.perf_counter() - encoded_at)

    def _advance(self, attempt: _Attempt, encode_s: float, upload_s: float) -> None:
        manifest = attempt.manifest
        self._writer.advance(manifest, attempt.encoded)
        attempt.step.committed = True
        self._anchors.consider(manifest, attempt.encoded.sums)
        self._unanswered = None
        self._nonces.clear()
        self.compaction.wake(manifest.version)
        if self._on_commit is not None:
            self._on_commit(
                CommitStats.of(
                    manifest,
                    self.run,
                    changed=attempt.encoded.changed,
                    blocked_ms=attempt.step.blocked_ms,
                    encode_ms=encode_s * 1e3,
                    upload_ms=upload_s * 1e3,
                    compaction_error=str(self.compaction.error or ""),
                    bytes_reused=self._writer.bytes_reused,
                    superseded=self.outage.superseded,
                )
            )

    def _after_anchor(self, stats: AnchorStats) -> None:
        if not stats.error:
            self._retention.wake(stats.version)
        if self._on_anchor is not None:
            self._on_anchor(stats)

    def _check_mine(self, found: Manifest, manifest: Manifest) -> None:
        """Raises unless ``found``, read from the bucket, is the manifest that was just created."""
        if found.nonce == manifest.nonce:
            return
        if found.nonce in self._nonces:
            # An earlier attempt that seemed lost was committed after all. The baseline moves to it;
            # the caller expects another number for these weights, so this is an error.
            self._adopt(found)
            raise CommittedLateError(
                "an earlier attempt at this version was committed late",
                hint="publish again: the weights become the version after it",
                run=self.bucket.url,
                version=manifest.version,
            )
        raise self._writer.fence(manifest.version, "another publisher has committed this version")

    def _adopt(self, found: Manifest) -> None:
        """Moves the baseline to an earlier attempt's manifest by reading the version that it
        committed.
        """
        fresh = self._writer.baseline.fresh(self.run)
        mirror = load_mirror(self.bucket, self.run, at=found.version, into=fresh)
        self._anchors.leave(self._writer.baseline)
        self._writer.restart_from(mirror)
        self._unanswered = None
        self._nonces.clear()


def _loaded(bits: Bits | LazyTensor) -> Bits:
    return bits.read() if isinstance(bits, LazyTensor) else bits
