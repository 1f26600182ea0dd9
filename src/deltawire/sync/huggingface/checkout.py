"""Keeps a Hugging Face directory at a version of a run, one complete version after another.

``DIR`` is a symbolic link. Its target lies next to it::

    DIR                       → .DIR.deltawire/0000000042
    .DIR.deltawire/lock         held by the process that pulls
    .DIR.deltawire/run          the run's id
    .DIR.deltawire/building/    the next version, and its number in building.version
    .DIR.deltawire/0000000041/  the version before, for readers that have opened it
    .DIR.deltawire/0000000042/

A version is built in ``building`` and renamed to its number once every byte is verified and on the
disk; then the link is replaced atomically. Readers of ``DIR`` therefore see complete versions only,
and a reader that resolves the link first (``os.path.realpath``) reads all files of one version.
Patching the files in place would take half the disk space, but a reader that has mapped them into
memory would see weights of two versions without a way to notice.

The files under construction are themselves the mirror, mapped into memory, so nothing is held
twice. The mirror starts as a copy of the previous version, after comparing that with its digest,
and applies the deltas. A killed process continues from ``building``: pieces of an anchor that are
there already, by their digests, are not fetched again.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
from blake3 import blake3

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, InputError
from deltawire.private_files import private_folder
from deltawire.store import Bucket, RetryingBucket
from deltawire.store.folder import flush_folder
from deltawire.sync.chain.objects import files_of, read_manifest
from deltawire.sync.chain.version_poller import VersionPoller
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Bits, Mirror
from deltawire.sync.follow.mirror_file import open_locked
from deltawire.sync.huggingface.checkpoint_dir import plans_of, read_files
from deltawire.sync.huggingface.safetensors_layout import FilePlan
from deltawire.sync.publish.encoding import chunks_of, digest_chunks
from deltawire.sync.publish.model_files import LAYOUT
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

READ_BYTES = 16 << 20
"""Files are read in parts of this many bytes: a truncated file is then an error, not a signal."""


class Checkout:
    """Keeps ``directory`` at a version of the run. Use it as a context; one process at a time.

    Raises `InputError` if the directory holds something else, follows another run, or is pulled by
    another process.

    Example::

        with Checkout(bucket, run, Path("model")) as checkout:
            checkout.bring_to(42)
    """

    def __init__(
        self, bucket: Bucket, run: Run, directory: Path, *, threads: int | None = None
    ) -> None:
        self.bucket = RetryingBucket.over(bucket)
        self.run = run
        self.directory = directory.absolute()
        self._threads = threads
        self._store = self.directory.parent / f".{self.directory.name}.deltawire"
        self._building = self._store / "building"
        self._poller = VersionPoller(self.bucket, run)
        self._resuming = False
        self._verified: set[int] = set()
        """Versions that this object has built, or has compared with their digests."""
        _check_free(self.directory)
        with self._writing("choose a writable folder"):
            self.directory.parent.mkdir(parents=True, exist_ok=True)
        private_folder(
            self._store, mode=0o755
        )  # Other users may read the versions but not write them.
        with self._writing("is another process pulling there?"):
            self._lock: IO[bytes] = open_locked(self._store / "lock")
        try:
            self._claim()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Checkout:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def version(self) -> int | None:
        """The version that the directory shows, None if it shows none yet."""
        with suppress(OSError):
            target = self.directory.readlink()
            if target.parent == Path(self._store.name):
                return _number(target.name)
        return None

    def newest(self) -> int | None:
        """Returns the newest version that can be read if it is newer than the directory's, else
        None.
        """
        held = self.version
        found = self._poller.newer(-1 if held is None else held)
        return None if found is None else found.version

    @property
    def pause_s(self) -> float:
        """Seconds to sleep before the next `newest`."""
        return self._poller.pause_s

    @property
    def alarm(self) -> CorruptError | None:
        """Why a newer manifest could not be read, None if all could."""
        return self._poller.alarm

    def bring_to(self, version: int, *, known: Manifest | None = None) -> str:
        """Makes the directory show ``version``, and returns its digest.

        ``known`` is the version's manifest, if the caller has just read it.

        A version whose files exist is first compared with its manifest, and rebuilt if it differs.
        Raises `CorruptError` if the run has no such version or it can no longer be read,
        `RetryError` if the store does not answer, and `InputError` if the file system fails (a full
        disk, for example); the directory then shows the same version as before.
        """
        manifest = known or self._manifest(version)
        with self._writing("free some space, or repair the disk; then run the same command again"):
            if version not in self._verified and not self._is_intact(version, manifest):
                self._build(version, manifest)
            self._verified.add(version)
        if self.version != version:
            self._show(version)
        self._prune(version)
        return manifest.digest

    def _is_intact(self, version: int, manifest: Manifest) -> bool:
        try:
            self._compare(version, manifest)
        except CorruptError:
            return False
        return True

    def verify(self) -> tuple[int, str]:
        """Compares every file that the directory shows with its version; changes nothing.

        Returns the version and its digest. Raises `CorruptError` naming what differs, `InputError`
        if the directory shows no version.
        """
        version = self.version
        if version is None:
            raise InputError(f"{self.directory} shows no version", hint="pull one first")
        manifest = self._manifest(version)
        self._compare(version, manifest)
        return version, manifest.digest

    def _compare(self, version: int, manifest: Manifest) -> None:
        """Raises `CorruptError` unless the files of a version match its manifest."""
        folder = self._store / _name(version)
        listed = files_of(self.run, manifest)
        for file in listed:
            if file.name != LAYOUT and _hash_of(folder / file.name) != file.blob:
                raise CorruptError(
                    f"{folder / file.name} differs from what was published", version=version
                )
        layout = [file for file in listed if file.name == LAYOUT]
        plans = plans_of(
            self.run, read_files(self.bucket, layout, version=version), url=self.bucket.url
        )
        if not _made(folder, plans):
            raise CorruptError(f"{folder} lacks files that deltawire wrote", version=version)
        if _digest_files(folder, plans, self.run).hex() != manifest.digest:
            raise CorruptError(f"the weights in {folder} were changed", version=version)

    @contextmanager
    def _writing(self, hint: str) -> Iterator[None]:
        """Translates the file system's errors, and deletes an unfinished build when the disk is
        full.
        """
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                shutil.rmtree(self._building, ignore_errors=True)
            raise InputError(
                f"cannot pull into {self.directory}: {error.strerror or error}", hint=hint
            ) from error

    def unfinished(self) -> int | None:
        """Returns the version that an earlier process was building when it ended, or None."""
        with suppress(OSError, ValueError):
            return int((self._store / "building.version").read_text(encoding="ascii"))
        return None

    def _manifest(self, version: int) -> Manifest:
        manifest = read_manifest(self.bucket, self.run, version)
        if manifest is None:
            raise CorruptError(
                "there is no such version",
                hint="deltawire log lists them",
                run=self.bucket.url,
                version=version,
            )
        return manifest

    def _build(self, version: int, manifest: Manifest) -> None:
        listed = files_of(self.run, manifest)
        files = read_files(self.bucket, listed, version=version)
        plans = plans_of(self.run, files, url=self.bucket.url)
        self._begin(version, plans)
        with _mapped(self._building, plans, self.run) as target:
            self._copy_held(target, version)
            load_mirror(
                self.bucket, self.run, at=version, into=target,
                resume=self._resuming, threads=self._threads, known=manifest,
            )  # fmt: skip
            if target.digest.hex() != manifest.digest:
                raise CorruptError("not the version's digest", run=self.bucket.url, version=version)
        for name, data in files.items():
            if name != LAYOUT:
                _write(self._building / name, data)
        flush_folder(self._building)
        finished, damaged = self._store / _name(version), self._store / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        if finished.is_dir():
            finished.rename(damaged)
        self._building.rename(finished)
        flush_folder(self._store)
        shutil.rmtree(damaged, ignore_errors=True)
        (self._store / "building.version").unlink(missing_ok=True)

    def _begin(self, version: int, plans: list[FilePlan]) -> None:
        """Creates the files at their full size, or continues those of a process that ended."""
        older = any(held < version for held in self._versions())
        self._resuming = not older and self.unfinished() == version and _made(self._building, plans)
        if self._resuming:
            return
        (self._store / "building.version").unlink(missing_ok=True)
        shutil.rmtree(self._building, ignore_errors=True)
        needed, free = sum(plan.bytes for plan in plans), shutil.disk_usage(self._store).free
        if needed > free:
            raise InputError(
                f"the version needs {needed} bytes; {self._store.parent} has {free} free",
                hint="free some space; then run the same command again",
                version=version,
            )
        self._building.mkdir()
        for plan in plans:
            with (self._building / plan.name).open("wb") as file:
                file.write(plan.prefix)
                _reserve(file, plan.bytes)
        _write(self._store / "building.version", str(version).encode())

    def _copy_held(self, target: Mirror, version: int) -> None:
        """Starts from the newest undamaged version on this disk before ``version``."""
        for held in sorted((v for v in self._versions() if v < version), reverse=True):
            manifest = read_manifest(self.bucket, self.run, held)
            if manifest is None:
                continue
            try:
                self._copy(target, held, manifest)
            except (CorruptError, OSError):
                target.begin()
                continue
            return

    def _copy(self, target: Mirror, held: int, manifest: Manifest) -> None:
        listed = files_of(self.run, manifest)
        files = read_files(
            self.bucket, [file for file in listed if file.name == LAYOUT], version=held
        )
        plans = plans_of(self.run, files, url=self.bucket.url)
        folder = self._store / _name(held)
        if not _made(folder, plans):
            raise CorruptError("the directory lacks files that deltawire wrote", version=held)
        with _mapped(folder, plans, self.run, writable=False) as source:
            for name, bits in target.tensors.items():
                bits[:] = source.tensors[name]
        found = sum(
            digest_chunks(chunks_of(self.run, target), target, threads=self._threads).values(),
            codec.ZERO,
        )
        if found.hex() != manifest.digest:
            raise CorruptError("the directory was changed", version=held)
        target.finish(held, found, found)

    def _show(self, version: int) -> None:
        fresh = self._store / "link"
        fresh.unlink(missing_ok=True)
        try:
            fresh.symlink_to(Path(self._store.name) / _name(version), target_is_directory=True)
            if self.directory.is_dir() and not self.directory.is_symlink():
                self.directory.rmdir()  # Fails if it is no longer empty, as it was at the start.
            fresh.replace(self.directory)
        except OSError as error:
            raise InputError(
                f"cannot make {self.directory} a link to its version: {error.strerror or error}",
                hint="choose a file system with symbolic links",
            ) from error
        flush_folder(self.directory.parent)

    def _prune(self, version: int) -> None:
        """Deletes all versions but the one shown and one more, which readers may have open."""
        others = sorted((v for v in self._versions() if v != version), reverse=True)
        before = [v for v in others if v < version] or others
        for number in others:
            if number != before[0]:
                shutil.rmtree(self._store / _name(number), ignore_errors=True)

    def _versions(self) -> list[int]:
        found = (_number(path.name) for path in self._store.iterdir() if path.is_dir())
        return [number for number in found if number is not None]

    def _claim(self) -> None:
        mark = self._store / "run"
        if not mark.exists():
            fresh = self._store / "run.new"
            with self._writing("free some space, or choose another folder"):
                _write(fresh, self.run.id.encode())
                fresh.replace(mark)  # A partially written id would look like that of another run.
        if mark.read_bytes() != self.run.id.encode():
            raise InputError(
                f"{self.directory} follows another run",
                hint=f"choose another directory, or remove it and {self._store}",
            )


def _check_free(directory: Path) -> None:
    if directory.is_symlink() or not directory.exists():
        link = directory.readlink() if directory.is_symlink() else None
        if link is None or link.parent.name == f".{directory.name}.deltawire":
            return
        raise InputError(f"{directory} is a link to something else", hint="choose another name")
    if not directory.is_dir() or any(directory.iterdir()):
        raise InputError(
            f"{directory} exists but was not created by deltawire pull",
            hint="choose a new name or an empty directory",
        )


def _made(folder: Path, plans: list[FilePlan]) -> bool:
    """Returns whether a folder holds the planned safetensors files, by their sizes and headers."""
    try:
        for plan in plans:
            with (folder / plan.name).open("rb") as file:
                if file.read(len(plan.prefix)) != plan.prefix:
                    return False
                if os.fstat(file.fileno()).st_size != plan.bytes:
                    return False
    except OSError:
        return False
    return True


@contextmanager
def _mapped(
    folder: Path, plans: list[FilePlan], run: Run, *, writable: bool = True
) -> Iterator[Mirror]:
    """Maps the safetensors files of a folder as a mirror that holds no version.

    On exit, writes what could not be a view (an unaligned tensor, the second name of a tied one),
    and flushes everything to the disk.
    """
    specs = {spec.name: spec for spec in run.tensors}
    tensors: dict[str, Bits] = {}
    later: list[tuple[Bits, str]] = []
    maps: list[mmap.mmap] = []
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    for plan in plans:
        with (folder / plan.name).open("r+b" if writable else "rb") as file:
            memory = mmap.mmap(file.fileno(), plan.bytes, access=access)
        maps.append(memory)
        raw = np.frombuffer(memory, np.uint8)
        for span in plan.spans:
            dtype = codec.unsigned_of(specs[span.stored].dtype)
            part = raw[span.begin : span.end]
            aligned = span.begin % dtype.itemsize == 0
            if span.stored not in tensors and aligned:
                tensors[span.stored] = part.view(dtype)
                continue
            if span.stored not in tensors:
                tensors[span.stored] = np.frombuffer(part.tobytes(), dtype).copy()
            later.append((part, span.stored))
    mirror = Mirror({spec.name: tensors[spec.name] for spec in run.tensors}, -1, Digest(0, 0))
    try:
        yield mirror
        if writable:
            for part, stored in later:
                part[:] = tensors[stored].view(np.uint8)
            for memory in maps:
                memory.flush()
    finally:
        mirror.tensors = {}
        tensors.clear()
        later.clear()
        for memory in maps:
            with suppress(BufferError):  # An error in flight may still hold a view.
                memory.close()
    for plan in plans if writable else ():
        with (folder / plan.name).open("rb") as file:
            os.fsync(file.fileno())


def _digest_files(folder: Path, plans: list[FilePlan], run: Run) -> Digest:
    """Computes the model's digest from its files; names of tied tensors must hold the same bits.

    Raises `CorruptError` if they do not, or a file is shorter than planned.
    """
    specs = {spec.name: spec for spec in run.tensors}
    digests: dict[str, Digest] = {}
    for plan in plans:
        with (folder / plan.name).open("rb") as file:
            for span in plan.spans:
                dtype = codec.unsigned_of(specs[span.stored].dtype)
                file.seek(span.begin)
                found, at = codec.ZERO, 0
                for begin in range(span.begin, span.end, READ_BYTES):
                    data = file.read(min(READ_BYTES, span.end - begin))
                    if len(data) != min(READ_BYTES, span.end - begin):
                        raise CorruptError(f"{folder / plan.name} was truncated")
                    bits = np.frombuffer(data, dtype)
                    found += codec.digest_bits(span.stored, bits, at)
                    at += bits.size
                if digests.setdefault(span.stored, found) != found:
                    raise CorruptError(f"{span.name[:80]!r} differs from the tensor it is tied to")
    return sum(digests.values(), codec.ZERO)


def _hash_of(path: Path) -> str:
    """Returns the BLAKE3 of a small file, empty if it cannot be read."""
    try:
        return blake3(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _reserve(file: IO[bytes], size: int) -> None:
    """Allocates disk space now: a full disk met in mapped memory would kill the process."""
    file.flush()
    file.truncate(size)
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _name(version: int) -> str:
    return f"{version:010d}"


def _number(name: str) -> int | None:
    return int(name) if len(name) == 10 and name.isascii() and name.isdigit() else None
