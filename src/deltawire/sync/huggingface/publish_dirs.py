"""Publishing checkpoints that somebody else's trainer writes: a series of directories, or a folder
that grows.

What is published already is known by content, not by name: the run's versions have digests and
lists of files, and the directories are held against them in order. A directory that equals a later
version than the one before it did is that version; the first one that equals none is published, and
so is everything behind it. So the same command may be stopped and started at any time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltawire.codec import Digest
from deltawire.errors import CorruptError, FencedError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import (
    newest_version,
    read_manifest,
    read_run,
    with_retries,
)
from deltawire.sync.chain.route_finder import READERS
from deltawire.sync.follow.fetch import in_order
from deltawire.sync.huggingface.checkpoint_dir import (
    Checkpoint,
    check_alike,
    files_of,
    put_files,
    read_checkpoint,
    same_files,
    weight_files,
)
from deltawire.sync.maintain.gc_intents import blobs_stay
from deltawire.sync.maintain.retention import GRACE_S, prune
from deltawire.sync.publish.publisher import CommitStats, Publisher
from deltawire.sync.publish.sources import open_publisher
from deltawire.wire.manifest import BlobRef, Manifest
from deltawire.wire.run import ModelFile, Run
from deltawire.wire.seal import Signer

CHECKPOINT_RECORD = "checkpoint"
"""Under this member of a version's metadata stands the name of the directory it was made of."""


@dataclass(frozen=True)
class Outcome:
    """What became of a directory: ``version``, whether it was ``published`` now, and at what cost
    (None if it was there already, or is only ``planned``)."""

    path: Path
    version: int
    published: bool
    digest: str
    bytes: int
    planned: bool = False
    receipt: CommitStats | None = None


class CheckpointPublisher:
    """Publishes directories to one run, each as the next version. Use it as a context.

    ``retain`` keeps so many of the newest versions readable and retires older ones after each
    anchor; 0 keeps all. ``options`` go to `Publisher`. ``progress`` is told of bytes that were
    looked at, ``on_digest`` of a directory that is to be uploaded, ``on_version``, while what is
    published already is read, of the versions done and in all. Not for use by several threads at
    once.
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
        dry_run: bool = False,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
        on_digest: Callable[[Path], None] | None = None,
        on_version: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        """Raises `InputError` if the run is signed by another key, or asks for one."""
        self.bucket = bucket
        self._name = name
        self._signer = signer
        self._retain = retain
        self._grace_s = grace_s
        self._dry_run = dry_run
        self._threads = threads
        self._progress = progress
        self._on_digest = on_digest
        self._options = options
        self._publisher: Publisher | None = None
        self._receipts: list[CommitStats] = []
        key = signer.public_key if signer else public_key
        self.run: Run | None = with_retries(lambda: read_run(bucket, public_key=key))
        if self.run is not None and self.run.public_key and signer is None and not dry_run:
            raise InputError("the run is signed", hint="pass its private key", run=bucket.url)
        self._there: list[tuple[str, list[ModelFile]]] = []
        self._at = -1
        """The version that the directory before was, or has become."""
        if self.run is not None:
            self._there = _identities(bucket, self.run, on_version or (lambda *_: None))

    def __enter__(self) -> CheckpointPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the publisher's threads; raises what the version under way failed with."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def publish(self, path: Path) -> Outcome:
        """Publish a directory, unless it is a version already; returns when it is committed.

        Raises `InputError` if it is no whole Hugging Face directory, holds another model than the
        run's, or changes meanwhile, `FencedError` if another publisher has taken the run.
        """
        checkpoint = read_checkpoint(path)
        if self.run is not None:
            check_alike(checkpoint, self.run, url=self.bucket.url)
        digest = checkpoint.digest(threads=self._threads, progress=self._progress)
        files = checkpoint.model_files()
        for version in range(self._at + 1, len(self._there)):
            if self._there[version][0] == digest.hex() and same_files(
                self._there[version][1], files
            ):
                self._at = version
                return Outcome(path, version, False, digest.hex(), checkpoint.bytes)
        if self._on_digest is not None:
            self._on_digest(path)
        receipt = None if self._dry_run else self._commit(checkpoint, digest, files)
        self._at = len(self._there)
        self._there.append((digest.hex(), files))
        if receipt is not None and receipt.bytes_anchor and self._retain:
            self._retire(receipt.version)
        return Outcome(
            path,
            self._at,
            receipt is not None,
            digest.hex(),
            checkpoint.bytes,
            planned=receipt is None,
            receipt=receipt,
        )

    def _commit(
        self, checkpoint: Checkpoint, digest: Digest, files: list[ModelFile]
    ) -> CommitStats:
        metadata = {CHECKPOINT_RECORD: checkpoint.path.name}
        put_files(self.bucket, checkpoint.files)
        publisher = self._publisher
        if publisher is None:
            publisher = self._publisher = self._open(checkpoint, files, metadata)
        if not self._receipts:
            assert self.run is not None
            if publisher.version + 1 != len(self._there):
                raise FencedError(
                    "somebody else publishes to this run",
                    hint="only one publisher may write to a run; this one stops",
                    run=self.bucket.url,
                    version=publisher.version,
                )
            publisher.publish(
                checkpoint.tensors,
                metadata=metadata,
                files=None if same_files(files, self.run.model_files) else files,
                expected=digest,
            )
            publisher.flush()
        receipt = self._receipts.pop()
        assert self.run is not None
        if not blobs_stay(self.bucket, self.run, [BlobRef(f.blob, f.bytes) for f in files]):
            # Retention took them while we were stalled, as nobody's yet.
            put_files(self.bucket, checkpoint.files)
        if receipt.digest != digest.hex():
            raise InputError(
                f"{checkpoint.path} changed while it was published",
                hint="publish it again once it is whole",
                run=self.bucket.url,
                version=receipt.version,
            )
        return receipt

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
            on_commit=self._receipts.append,
            **self._options,
        )
        self.run = publisher.run
        return publisher

    def _retire(self, version: int) -> None:
        assert self.run is not None
        prune(
            self.bucket,
            self.run,
            cutoff=version - self._retain + 1,
            grace_s=self._grace_s,
            signer=self._signer,
        )


def _identities(
    bucket: Bucket, run: Run, tell: Callable[[int, int], None]
) -> list[tuple[str, list[ModelFile]]]:
    """Digest and files of every version there is."""
    newest = with_retries(lambda: newest_version(bucket))
    count = 0 if newest is None else newest + 1

    def read(version: int) -> tuple[str, list[ModelFile]]:
        manifest: Manifest | None = None
        try:
            manifest = with_retries(lambda: read_manifest(bucket, run, version))
        except CorruptError:
            if version == newest:
                raise  # What comes next would build on it.
        return ("", []) if manifest is None else (manifest.digest, files_of(run, manifest))

    found: list[tuple[str, list[ModelFile]]] = []
    with ThreadPoolExecutor(1 if bucket.local else READERS, thread_name_prefix="reader") as pool:
        for identity in in_order(pool, read, range(count), ahead=2 * READERS):
            found.append(identity)
            tell(len(found), count)
    return found


@dataclass
class _Seen:
    stamp: tuple[tuple[str, int, int], ...] = ()
    since: float = 0.0


class CheckpointWatcher:
    """A folder whose subfolders are checkpoints, each of which becomes whole at some time.

    A subfolder is whole when it has a config.json, all safetensors files that its index names (or
    some, without an index), each as long as its header says, and none of its files has changed for
    ``settle_s``. They are taken in the order of the last number in their names (``checkpoint-900``
    before ``checkpoint-1000``), then of the names. One that becomes whole after a later one was
    taken is passed over: versions go forward only.
    """

    def __init__(
        self, folder: Path, *, settle_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder} to watch", hint="is the path right?")
        self.folder = folder
        self.passed_over: list[Path] = []
        self._settle_s = settle_s
        self._clock = clock
        self._seen: dict[Path, _Seen] = {}
        self._taken: set[Path] = set()
        self._last: tuple[int, str] | None = None

    def ready(self) -> Iterator[Path]:
        """The subfolders that are whole by now and were not given before, in order."""
        now = self._clock()
        for path in sorted((p for p in _folders(self.folder) if p not in self._taken), key=order):
            seen = self._seen.setdefault(path, _Seen(since=now))
            stamp = stamp_of(path)
            if stamp != seen.stamp:
                seen.stamp, seen.since = stamp, now
            if now - seen.since < self._settle_s or not is_whole(path):
                continue
            self._taken.add(path)
            del self._seen[path]
            if self._last is not None and order(path) < self._last:
                self.passed_over.append(path)
                continue
            self._last = order(path)
            yield path


def order(path: Path) -> tuple[int, str]:
    """Where a checkpoint stands among others: by the last number in its name, then by the name."""
    numbers = re.findall(r"[0-9]+", path.name)
    return (int(numbers[-1]) if numbers else -1, path.name)


def is_whole(path: Path) -> bool:
    """Whether everything that a Hugging Face directory needs is there, at its full size."""
    try:
        if not (path / "config.json").is_file():
            return False
        weight_files(path)
        read_checkpoint(path)
    except (InputError, OSError):
        return False
    return True


def stamp_of(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of every file of a directory."""
    found = []
    try:
        for file in sorted(path.iterdir()):
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns))
    except OSError:  # Something is renamed or removed just now.
        return ()
    return tuple(found)


def _folders(folder: Path) -> list[Path]:
    """Subfolders; hidden ones, and those that carry a mark of unfinished work, are none."""
    try:
        return [
            path
            for path in folder.iterdir()
            if path.is_dir() and not path.name.startswith(".") and not path.name.endswith(".tmp")
        ]
    except OSError as error:
        raise InputError(f"cannot look into {folder}: {error.strerror or error}") from error
