"""Publishes checkpoint directories that another program writes.

Directories are recognized by content, not by name: if a directory's weights are already a version,
it is that version, so the same command may be stopped and restarted at any time. New weights become
the next version unless the directory comes before a published one: old weights never become the
newest version unless the caller asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deltawire.codec import Digest
from deltawire.errors import CorruptError, FencedError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.gc_intents import blobs_stay
from deltawire.sync.chain.objects import find_run, read_manifest
from deltawire.sync.chain.retention import GRACE_S, prune
from deltawire.sync.huggingface.checkpoint_dir import (
    NO_FILES,
    Checkpoint,
    check_alike,
    put_files,
    read_checkpoint,
    same_files,
)
from deltawire.sync.huggingface.checkpoint_watcher import (
    Fingerprint,
    checkpoint_name,
    checkpoint_order,
    fingerprint_of,
)
from deltawire.sync.huggingface.identities import (
    CHECKPOINT_RECORD,
    IdentityIndex,
    identity_of,
    same_kind,
)
from deltawire.sync.publish.commit import CommitStats
from deltawire.sync.publish.later_anchors import AnchorStats
from deltawire.sync.publish.publisher import Publisher
from deltawire.sync.publish.safetensors_files import CheckpointDirError
from deltawire.sync.publish.sources import open_publisher
from deltawire.wire.identities import VersionIdentity, files_key
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import ModelFile, Run
from deltawire.wire.seal import Signer

logger = logging.getLogger(__name__)

State = Literal["published", "there", "planned", "older"]


@dataclass(frozen=True)
class DirectoryResult:
    """The outcome for one directory.

    The directory was ``published`` by this call, with ``stats``; was already ``there``; is only
    ``planned``, in a dry run; or is ``older`` than the published weights and was skipped, in which
    case ``version`` is the newest one.
    """

    path: Path
    version: int
    state: State
    digest: str
    bytes: int
    stats: CommitStats | None = None

    @property
    def published(self) -> bool:
        """Return whether this call made the version."""
        return self.state == "published"


class CheckpointPublisher:
    """Publishes directories to one run, each as the next version. Use it as a context.

    ``retain`` is the number of newest versions that stay readable; older ones are pruned after each
    anchor (0 keeps all). ``backwards`` lets weights of an earlier version, or of a directory that
    comes before a published one, become the newest version. ``lent`` are files, such as
    config.json, that directories may lack. ``options`` go to `Publisher`. ``progress`` gets the
    bytes read, ``on_digest`` a directory about to be uploaded, ``on_version`` the versions read at
    the start and their total. Not for use by several threads at once.

    Example::

        with CheckpointPublisher(open_bucket("s3://bucket/run")) as publisher:
            for path in sorted(Path("outputs").glob("checkpoint-*")):
                print(publisher.publish(path))
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        name: str = "run",
        public_key: str = "",
        signer: Signer | None = None,
        retain: int = 0,
        grace_s: float = GRACE_S,
        backwards: bool = False,
        dry_run: bool = False,
        lent: Mapping[str, bytes] = NO_FILES,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
        on_digest: Callable[[Path], None] | None = None,
        on_version: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        """Raises `InputError` if the run is signed by another key, or needs a key."""
        self.bucket = bucket
        self._name = name
        self._signer = signer
        self._retain = retain
        self._grace_s = grace_s
        self._backwards = backwards
        self._dry_run = dry_run
        self._lent = lent
        self._threads = threads
        self._progress = progress
        self._on_digest = on_digest
        self._options = options
        self._publisher: Publisher | None = None
        self._stats: list[CommitStats] = []
        self._anchors: list[AnchorStats] = []
        self._digests: dict[Path, tuple[Fingerprint, Digest]] = {}
        self._public_key = signer.public_key if signer else public_key
        self._opening = False
        """An attempt to open the publisher failed; it may have started the run."""
        self.run: Run | None = find_run(self.bucket, public_key=self._public_key)
        if self.run is not None and self.run.public_key and signer is None and not dry_run:
            raise InputError("the run is signed", hint="pass its private key", run=bucket.url)
        self._index: IdentityIndex | None = None
        self._planned: dict[int, VersionIdentity] = {}
        """Identities that a dry run without a run would have published."""
        self._names_went_back = False
        self._at = -1
        """With ``backwards``: the version of the previous directory."""
        if self.run is not None:
            self._index = IdentityIndex(
                self.bucket, self.run, signer=signer, report=on_version or (lambda *_: None)
            )
            self._save_index()

    def __enter__(self) -> CheckpointPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the publisher's threads; raises the error of the version in progress."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def find(self, path: Path) -> int | None:
        """Returns the newest version with a directory's weights, None if there is none."""
        if not self._versions:
            return None
        digest = self._digest(read_checkpoint(path, lent=self._lent)).hex()
        found = [v for v, known in self._versions.items() if known.digest == digest]
        return max(found, default=None)

    def publish(
        self, path: Path, *, in_name_order: bool = False, in_call_order: bool = False
    ) -> DirectoryResult:
        """Publishes a directory, unless it is a version already; returns when it is committed.

        With ``in_name_order`` the directory is skipped as ``older`` if one with a later name was
        published (see `checkpoint_order`). With ``in_call_order`` it becomes the newest version,
        whatever its name, unless it is that already.

        Raises `CheckpointDirError` if the directory is incomplete, holds another model than the
        run's, or changes meanwhile; `FencedError` if another publisher has taken the run.
        """
        checkpoint = read_checkpoint(path, lent=self._lent)
        if self.run is not None:
            check_alike(checkpoint, self.run, url=self.bucket.url)
        digest = self._digest(checkpoint)
        files = checkpoint.model_files()
        self._settle()
        if in_call_order:
            there = self._match_newest(digest.hex(), files)
            self._warn_of_names(path)
        else:
            there = self._match(digest.hex(), files)
        if there is not None:
            self._at = there
            return DirectoryResult(path, there, "there", digest.hex(), checkpoint.bytes)
        if in_name_order and not self._backwards and self._comes_before_published(path):
            return DirectoryResult(path, self.newest, "older", digest.hex(), checkpoint.bytes)
        if self._on_digest is not None:
            self._on_digest(path)
        stats = None if self._dry_run else self._commit(checkpoint, digest, files)
        self._at = self.newest + 1 if stats is None else stats.version
        self._add(
            VersionIdentity(
                self._at, digest.hex(), files_key(files), checkpoint_name(path.resolve())
            )
        )
        if stats is not None and stats.bytes_anchor and self._retain:
            self._prune(stats.version)
        return DirectoryResult(
            path,
            self._at,
            "planned" if stats is None else "published",
            digest.hex(),
            checkpoint.bytes,
            stats,
        )

    @property
    def _versions(self) -> Mapping[int, VersionIdentity]:
        """The identity of each version that can be read, oldest first."""
        return self._planned if self._index is None else self._index.known

    def _add(self, identity: VersionIdentity) -> None:
        if self._index is None and self.run is not None:
            self._index = IdentityIndex(self.bucket, self.run, signer=self._signer)
        if self._index is None:
            self._planned[identity.version] = identity
            return
        self._index.add(identity)
        self._save_index()

    def _save_index(self) -> None:
        if self._index is not None and not self._dry_run:
            self._index.save()

    @property
    def newest(self) -> int:
        """The newest version that can be read, -1 if there is none."""
        return max(self._versions, default=-1)

    def _digest(self, checkpoint: Checkpoint) -> Digest:
        """Reads a directory's weights for their digest, unless nothing changed since it was
        read.
        """
        fingerprint = fingerprint_of(checkpoint.path)
        known = self._digests.get(checkpoint.path)
        if known is None or not fingerprint or known[0] != fingerprint:
            digest = checkpoint.digest(threads=self._threads, progress=self._progress)
            known = self._digests[checkpoint.path] = (fingerprint, digest)
        return known[1]

    def _match(self, digest: str, files: list[ModelFile]) -> int | None:
        """Returns the version that a directory is, None if it must be published.

        The newest version's weights with other files make a new version; older weights with other
        files do not, because they would become the newest.
        """
        exact = list(same_kind(self._versions, digest, files_key(files)))
        later = min((v for v in exact if v > self._at), default=None)
        if self._backwards:
            return later
        same = [v for v, known in self._versions.items() if known.digest == digest]
        if exact or not same:
            return max(exact, default=None) if later is None else later
        return None if max(same) == self.newest else max(same)

    def _match_newest(self, digest: str, files: list[ModelFile]) -> int | None:
        newest = self._versions.get(self.newest)
        same = newest is not None and (newest.digest, newest.files) == (digest, files_key(files))
        return self.newest if same else None

    def _warn_of_names(self, path: Path) -> None:
        """Logs, once, that names begin again, as those of a trainer that was restarted."""
        if not self._names_went_back and self._comes_before_published(path):
            self._names_went_back = True
            logger.warning(
                "%s comes before directories that were published: the trainer counts from an "
                "earlier number again; its directories are published in the order in which they "
                "come",
                path.name,
            )

    def _comes_before_published(self, path: Path) -> bool:
        names = [Path(known.name) for known in self._versions.values() if known.name]
        return any(checkpoint_order(path) < checkpoint_order(name) for name in names)

    def _settle(self) -> None:
        """Counts this publisher's versions that were committed although their call failed."""
        publisher = self._publisher
        if self._opening:
            self.run = find_run(self.bucket, public_key=self._public_key)
            if self.run is not None:
                self._index = IdentityIndex(self.bucket, self.run, signer=self._signer)
            self._opening = False
        if publisher is None or self.run is None:
            return
        publisher.settle()
        self._stats.clear()
        for version in range(self.newest + 1, publisher.version + 1):
            try:
                manifest = read_manifest(self.bucket, self.run, version)
            except CorruptError:
                continue  # The publisher skipped this number.
            if manifest is None or manifest.epoch != publisher.epoch:
                raise self._fenced(version)
            self._add(identity_of(self.run, manifest))

    def _commit(
        self, checkpoint: Checkpoint, digest: Digest, files: list[ModelFile]
    ) -> CommitStats:
        metadata = {CHECKPOINT_RECORD: checkpoint_name(checkpoint.path.resolve())}
        put_files(self.bucket, checkpoint.files)
        publisher = self._publisher
        if publisher is None:
            self._opening = True
            publisher = self._publisher = self._open(checkpoint, files, metadata)
            self._opening = False
        assert self.run is not None
        if not self._stats:
            if publisher.version != self.newest:
                raise self._fenced(publisher.version)
            publisher.publish(
                checkpoint.tensors,
                metadata=metadata,
                files=None if same_files(files, self.run.model_files) else files,
                expected=digest,
            )
            publisher.flush()
        publisher.wait_for_anchor()
        stats = self._with_anchor(self._stats.pop())
        if not blobs_stay(self.bucket, self.run, [BlobRef(f.blob, f.bytes) for f in files]):
            # Retention deleted them while this process was stalled: no version referred to them.
            put_files(self.bucket, checkpoint.files)
        if stats.digest != digest.hex():
            raise CheckpointDirError(
                f"{checkpoint.path} changed while it was published",
                hint="publish it again once it is complete",
                run=self.bucket.url,
                version=stats.version,
            )
        return stats

    def _with_anchor(self, stats: CommitStats) -> CommitStats:
        """Adds the bytes of the anchor that followed the version, if one did."""
        made = [one for one in self._anchors if one.version == stats.version and not one.error]
        self._anchors.clear()
        if not made:
            return stats
        return replace(stats, bytes_anchor=made[0].bytes_anchor, bytes_reused=made[0].bytes_reused)

    def _open(
        self, checkpoint: Checkpoint, files: list[ModelFile], metadata: dict[str, Any]
    ) -> Publisher:
        publisher = open_publisher(
            self.bucket,
            checkpoint.tensors,
            specs=checkpoint.specs,
            name=self._name,
            model_files=files,
            metadata=metadata,
            signer=self._signer,
            threads=self._threads,
            on_commit=self._stats.append,
            on_anchor=self._anchors.append,
            **self._options,
        )
        self.run = publisher.run
        return publisher

    def _fenced(self, version: int) -> FencedError:
        return FencedError(
            "another process publishes to this run",
            hint="only one publisher may write to a run; this one stops",
            run=self.bucket.url,
            version=version,
        )

    def _prune(self, version: int) -> None:
        assert self.run is not None
        prune(
            self.bucket,
            self.run,
            cutoff=version - self._retain + 1,
            grace_s=self._grace_s,
            signer=self._signer,
        )
