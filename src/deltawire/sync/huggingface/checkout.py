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
twice. The mirror starts as the previous version, after comparing that with its digest, and applies
the deltas. Each file begins in the first way that works:

1. A reflink shares the previous file's blocks, and only changed pages are written.
2. A hard link shares the whole file, if the deltas change no tensor in it. Such a file is mapped
privately: nothing is ever written to it in place. If a tensor in it changes after all, because a
damaged object led the mirror another way, the file is replaced.
3. Else the file is copied.

A killed process continues from ``building``: pieces of an anchor that are there already, by their
digests, are not fetched again.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
from blake3 import blake3

from deltawire import codec
from deltawire.errors import CorruptError, InputError
from deltawire.private_files import private_folder
from deltawire.store import Bucket
from deltawire.store.folder import flush_folder
from deltawire.sync.chain.objects import files_of, read_manifest
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.version_poller import VersionPoller
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.follow.mirror_file import open_locked
from deltawire.sync.huggingface.checkpoint_dir import plans_of, read_files
from deltawire.sync.huggingface.mapped_files import MappedMirror, digest_files, made, mapped
from deltawire.sync.huggingface.safetensors_layout import FilePlan
from deltawire.sync.huggingface.shared_files import FileOrigin, clone, link
from deltawire.sync.publish.encoding import chunks_of, digest_chunks
from deltawire.sync.publish.model_files import LAYOUT
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run


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
        self.bucket = bucket
        self.run = run
        self.directory = directory.absolute()
        self._threads = threads
        self._store = self.directory.parent / f".{self.directory.name}.deltawire"
        self._building = self._store / "building"
        self._poller = VersionPoller(self.bucket, run)
        self._resuming = False
        self._base: int | None = None
        """The version whose files those under construction share."""
        self.written: dict[FileOrigin, int] = {}
        """Bytes of the files of the version built last, by the way in which each began; of a cloned
        file only the changed pages were written, of a linked one nothing."""
        self.changed_bytes = 0
        """Bytes of the pages of those files that changes were written to."""
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

    @property
    def bytes_written(self) -> int:
        """Bytes of weights that the last `bring_to` wrote to the disk: copied files, and the pages
        of the others that changed."""
        changed = self.changed_bytes if self.written.get(FileOrigin.CLONED) else 0
        return self.written.get(FileOrigin.COPIED, 0) + changed

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
        self.written, self.changed_bytes = {}, 0
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
        if not made(folder, plans):
            raise CorruptError(f"{folder} lacks files that deltawire wrote", version=version)
        if digest_files(folder, plans, self.run).hex() != manifest.digest:
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
        try:
            self._build_files(version, manifest, plans, share=True)
        except _DamagedBaseError:
            self._build_files(version, manifest, plans, share=False)
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

    def _build_files(
        self, version: int, manifest: Manifest, plans: list[FilePlan], *, share: bool
    ) -> None:
        """Builds the weights of a version; with ``share``, from files of an earlier one.

        Raises `_DamagedBaseError` if that one turns out to be damaged.
        """
        ways = self._begin(version, plans, share=share)
        linked = {name for name, way in ways.items() if way is FileOrigin.LINKED}
        self.changed_bytes = 0
        with mapped(self._building, plans, self.run, private=linked) as target:
            self._copy_held(target, version, plans, ways)
            load_mirror(
                self.bucket, self.run, at=version, into=target,
                resume=self._resuming, threads=self._threads, known=manifest,
            )  # fmt: skip
            if target.digest.hex() != manifest.digest:
                raise CorruptError("not the version's digest", run=self.bucket.url, version=version)
            self.changed_bytes = target.changed_bytes
            for plan in plans:
                if plan.name in linked and target.may_have_changed(plan):
                    self._rewrite(plan, target)
                    ways[plan.name] = FileOrigin.COPIED
        self.written = dict.fromkeys(FileOrigin, 0)
        for plan in plans:
            self.written[ways[plan.name]] += plan.bytes

    def _rewrite(self, plan: FilePlan, target: Mirror) -> None:
        """Replaces a linked file by one with the mirror's bits, under the same name."""
        path = self._building / plan.name
        path.unlink()
        with path.open("xb") as file:
            file.write(plan.prefix)
            for span in plan.spans:
                file.seek(span.begin)
                file.write(target.tensors[span.stored].view(np.uint8).data)
            file.truncate(plan.bytes)
            file.flush()
            os.fsync(file.fileno())

    def _begin(self, version: int, plans: list[FilePlan], *, share: bool) -> dict[str, FileOrigin]:
        """Creates the files, or continues those of a process that ended. Returns how each began."""
        older = any(held < version for held in self._versions())
        all_copied = {plan.name: FileOrigin.COPIED for plan in plans}
        self._base = None
        self._resuming = not older and self.unfinished() == version and made(self._building, plans)
        if self._resuming:
            return all_copied
        (self._store / "building.version").unlink(missing_ok=True)
        shutil.rmtree(self._building, ignore_errors=True)
        self._building.mkdir()
        shared, changed = self._share(version, plans) if share else ({}, None)
        ways = all_copied | shared
        copied = [plan for plan in plans if ways[plan.name] is FileOrigin.COPIED]
        cloned = [plan for plan in plans if ways[plan.name] is FileOrigin.CLONED]
        needed = sum(plan.bytes for plan in copied) + _bytes_of(cloned, changed)
        free = shutil.disk_usage(self._store).free
        if needed > free:
            shutil.rmtree(self._building, ignore_errors=True)
            raise InputError(
                f"the version needs {needed} bytes; {self._store.parent} has {free} free",
                hint="free some space; then run the same command again",
                version=version,
            )
        for plan in copied:
            with (self._building / plan.name).open("wb") as file:
                file.write(plan.prefix)
                _reserve(file, plan.bytes)
        _write(self._store / "building.version", str(version).encode())
        return ways

    def _share(
        self, version: int, plans: list[FilePlan]
    ) -> tuple[dict[str, FileOrigin], set[str] | None]:
        """Clones or links files of the newest earlier version on this disk, where that can be.

        Returns how each of these files began, and the tensors in them that will change, None for
        any.
        """
        held = max((v for v in self._versions() if v < version), default=None)
        if held is None:
            return {}, None
        folder = self._store / _name(held)
        changed = self._changed(held, version)
        found: dict[str, FileOrigin] = {}
        for plan in plans:
            source, target = folder / plan.name, self._building / plan.name
            if not made(folder, [plan]):
                continue
            if clone(source, target):
                found[plan.name] = FileOrigin.CLONED
            elif (
                changed is not None
                and changed.isdisjoint(span.stored for span in plan.spans)
                and link(source, target)
            ):
                found[plan.name] = FileOrigin.LINKED
        self._base = held if found else None
        return found, changed

    def _changed(self, held: int, version: int) -> set[str] | None:
        """Returns the tensors that the cheapest route from ``held`` changes, None if it leads over
        an anchor or there is none.
        """
        finder = RouteFinder(self.bucket, self.run, held=held, goal=version)
        found: set[str] = set()
        try:
            route = finder.find()
            for edge in () if route is None else route.edges:
                if edge.base is None:
                    return None
                step, ref = finder.step(edge)
                pieces = read_payload(self.bucket, self.run, step, ref).pieces
                found |= {self.run.tensors[piece.tensor].name for piece in pieces}
        except CorruptError:
            return None
        return None if route is None else found

    def _copy_held(
        self, target: MappedMirror, version: int, plans: list[FilePlan], ways: dict[str, FileOrigin]
    ) -> None:
        """Starts from the newest undamaged version on this disk before ``version``."""
        there = {
            span.stored
            for plan in plans
            if ways[plan.name] is not FileOrigin.COPIED
            for span in plan.spans
        }
        for held in sorted((v for v in self._versions() if v < version), reverse=True):
            manifest = read_manifest(self.bucket, self.run, held)
            try:
                if manifest is not None:
                    self._copy(target, held, manifest, there if held == self._base else set())
            except (CorruptError, OSError):
                target.begin()
            if target.version == held:
                return
            if held == self._base:
                raise _DamagedBaseError  # Its files were shared: begin without them.

    def _copy(self, target: Mirror, held: int, manifest: Manifest, there: set[str]) -> None:
        """Copies the bits of an earlier version, but for the tensors that are ``there``, and
        compares all with its digest.
        """
        listed = files_of(self.run, manifest)
        files = read_files(
            self.bucket, [file for file in listed if file.name == LAYOUT], version=held
        )
        plans = plans_of(self.run, files, url=self.bucket.url)
        folder = self._store / _name(held)
        if not made(folder, plans):
            raise CorruptError("the directory lacks files that deltawire wrote", version=held)
        with mapped(folder, plans, self.run, writable=False) as source:
            for name, bits in target.tensors.items():
                if name not in there:
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
                self._verified.discard(number)
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


class _DamagedBaseError(Exception):
    """The version whose files were shared is damaged."""


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


def _bytes_of(plans: list[FilePlan], changed: set[str] | None) -> int:
    """Returns the most bytes that changes to cloned files may take: all pages of the tensors that
    change (None: of all). A full disk met in mapped memory would kill the process."""
    return sum(
        span.end - span.begin
        for plan in plans
        for span in plan.spans
        if changed is None or span.stored in changed
    )


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
