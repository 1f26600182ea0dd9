"""A Hugging Face directory that follows a run, one whole version after another.

``DIR`` is a symbolic link. What it points to lies beside it::

    DIR                       → .DIR.deltawire/0000000042
    .DIR.deltawire/lock         held by whoever pulls
    .DIR.deltawire/run          the run's id
    .DIR.deltawire/building/    the next version, and its number in building.version
    .DIR.deltawire/0000000041/  the version before, for whoever has opened it
    .DIR.deltawire/0000000042/

A version is built in ``building`` and renamed to its number when every byte of it is checked and
on the disk; then the link is replaced, in one step. So a reader of ``DIR`` sees whole versions
alone, and one that resolves the link first (``os.path.realpath``) reads all files of one version.
Patching the files in place would take half the disk, but a reader that has them mapped into memory
would see weights of two versions, and no marker could tell it.

The tensors of the version that is being built are the mirror itself, mapped into memory: nothing is
held twice. It begins as a copy of the version before, which is held against its digest first, and
takes the deltas from there. After a kill, ``building`` is taken up again: pieces of an anchor that
are there already, by their digest, are not fetched again.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import newest_version, read_manifest, with_retries
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Bits, Mirror
from deltawire.sync.follow.mirror_file import open_locked
from deltawire.sync.huggingface.checkpoint_dir import files_of, plans_of, read_files
from deltawire.sync.huggingface.safetensors_layout import LAYOUT, FilePlan
from deltawire.sync.publish.encoding import chunks_of, digest_chunks
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

LOOK_EVERY_POLLS = 20
"""As a subscriber: every so many looks for the next manifest, a listing."""


class Checkout:
    """Keeps ``directory`` at a version of the run. Use it as a context; one process at a time.

    Raises `InputError` if the directory holds something else, follows another run, or is pulled by
    another process.
    """

    def __init__(
        self, bucket: Bucket, run: Run, directory: Path, *, threads: int | None = None
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.directory = directory.absolute()
        self._threads = threads
        self._store = self.directory.parent / f".{self.directory.name}.deltawire"
        self._building = self._store / "building"
        self._polls = 0
        self._resuming = False
        _check_free(self.directory)
        with self._writing("choose a folder that can be written"):
            self._store.mkdir(parents=True, exist_ok=True)
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
        """The newest version if it is newer than the directory's, else None. Looks for the next
        manifest by its name, and lists now and then, lest a lost one be waited for."""
        held = self.version
        self._polls += 1
        if (
            held is not None
            and self._polls % LOOK_EVERY_POLLS != 1
            and not self.bucket.exists(keys.manifest(held + 1))
        ):
            return None
        return newest_version(self.bucket, newer_than=held)

    def bring_to(self, version: int) -> str:
        """Have the directory show ``version``; its digest.

        Raises `CorruptError` if the run has no such version or it cannot be read any more,
        `RetryError` if the store does not answer, `InputError` if the file system refuses (a full
        disk, say); the directory then shows what it did before.
        """
        manifest = self._manifest(version)
        with self._writing("free some space, or mend the disk; the same command goes on from here"):
            if not (self._store / _name(version)).is_dir():
                self._build(version, manifest)
        if self.version != version:
            self._show(version)
        self._prune(version)
        return manifest.digest

    @contextmanager
    def _writing(self, hint: str) -> Iterator[None]:
        """What the file system refuses is an error with a way on."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot pull into {self.directory}: {error.strerror or error}", hint=hint
            ) from error

    def unfinished(self) -> int | None:
        """The version that was being built when an earlier process ended, None if none was."""
        with suppress(OSError, ValueError):
            return int((self._store / "building.version").read_text(encoding="ascii"))
        return None

    def _manifest(self, version: int) -> Manifest:
        manifest = with_retries(lambda: read_manifest(self.bucket, self.run, version))
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
        files = with_retries(lambda: read_files(self.bucket, listed, version=version))
        plans = plans_of(self.run, files, url=self.bucket.url)
        self._begin(version, plans)
        with _mapped(self._building, plans, self.run) as target:
            self._copy_held(target, version)
            load_mirror(
                self.bucket, self.run, at=version, into=target,
                resume=self._resuming, threads=self._threads,
            )  # fmt: skip
            if target.digest.hex() != manifest.digest:
                raise CorruptError("not the version's digest", run=self.bucket.url, version=version)
        for name, data in files.items():
            if name != LAYOUT:
                _write(self._building / name, data)
        _sync(self._building)
        (self._building).rename(self._store / _name(version))
        _sync(self._store)
        (self._store / "building.version").unlink(missing_ok=True)

    def _begin(self, version: int, plans: list[FilePlan]) -> None:
        """Make the files at their full size, or find them made by a process that was ended."""
        older = any(held < version for held in self._versions())
        self._resuming = not older and self.unfinished() == version and _made(self._building, plans)
        if self._resuming:
            return
        (self._store / "building.version").unlink(missing_ok=True)
        shutil.rmtree(self._building, ignore_errors=True)
        self._building.mkdir()
        for plan in plans:
            with (self._building / plan.name).open("wb") as file:
                file.write(plan.prefix)
                _reserve(file, plan.bytes)
        _write(self._store / "building.version", str(version).encode())

    def _copy_held(self, target: Mirror, version: int) -> None:
        """Begin with the newest version before ``version`` that is here, if all of it still is."""
        for held in sorted((v for v in self._versions() if v < version), reverse=True):
            manifest = with_retries(lambda v=held: read_manifest(self.bucket, self.run, v))  # type: ignore[misc]
            if manifest is None:
                continue
            try:
                self._copy(target, held, manifest)
            except (CorruptError, InputError, OSError):
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
            raise CorruptError("the directory is not as it was written", version=held)
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
                self.directory.rmdir()  # It was empty when we came; if it is not, this says so.
            fresh.replace(self.directory)
        except OSError as error:
            raise InputError(
                f"cannot make {self.directory} a link to its version: {error.strerror or error}",
                hint="choose a file system that has symbolic links",
            ) from error
        _sync(self.directory.parent)

    def _prune(self, version: int) -> None:
        """Keep the version shown, and one more for those who have opened it."""
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
                fresh.replace(mark)  # Half of it would be taken for another run's.
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
            f"{directory} is there and was not made by deltawire pull",
            hint="choose a name that is free, or an empty directory",
        )


def _made(folder: Path, plans: list[FilePlan]) -> bool:
    """Whether a folder holds the safetensors files that are planned, by their sizes and headers."""
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
    """A mirror whose memory is the safetensors files of a folder, at no version.

    On the way out, what could not be a view (a tensor that is not aligned in its file, the second
    name of a tied one) is written, and everything is on the disk.
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
        for place in plan.places:
            dtype = codec.unsigned_of(specs[place.stored].dtype)
            part = raw[place.begin : place.end]
            aligned = place.begin % dtype.itemsize == 0
            if place.stored not in tensors and aligned:
                tensors[place.stored] = part.view(dtype)
                continue
            if place.stored not in tensors:
                tensors[place.stored] = np.frombuffer(part.tobytes(), dtype).copy()
            later.append((part, place.stored))
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
            with suppress(BufferError):  # An error on its way up may hold a view for a while.
                memory.close()
    for plan in plans if writable else ():
        with (folder / plan.name).open("rb") as file:
            os.fsync(file.fileno())


def _reserve(file: IO[bytes], size: int) -> None:
    """Take the room now: a full disk found while writing to mapped memory would end the process."""
    file.flush()
    file.truncate(size)
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Names that were given in a folder outlive the machine's power."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Where folders cannot be opened, they cannot be synchronised either.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(version: int) -> str:
    return f"{version:010d}"


def _number(name: str) -> int | None:
    return int(name) if len(name) == 10 and name.isascii() and name.isdigit() else None
