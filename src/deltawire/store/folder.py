"""A folder as a bucket, with writes that survive a power cut.

An object is written to a temporary file in its folder, which is flushed to the disk before it is
given its name, and the folder is flushed after. So an object has all of its bytes or does not
exist, and once `put` or `create` returns, it exists after a power cut too. A temporary file's name
ends in ``#`` and digits, which listings leave out; those that killed processes leave are removed by
a later process that writes to the same folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from obstore.store import LocalStore

from deltawire.errors import CorruptError, InputError
from deltawire.private_files import open_beneath
from deltawire.store.bucket import Bucket, ObjectMeta
from deltawire.store.traffic import count

ABANDONED_S = 24 * 3600.0
"""Temporary files older than this, in seconds, belong to no living process."""

_TEMPORARY = re.compile(r"#\d+\Z")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class FolderBucket(Bucket):
    """A folder of the file system. Raises `OSError` if there is none.

    Links below the folder are not followed: a writer to the folder could make any file of its
    readers an object.

    ``durable=False`` leaves flushing to the operating system: for runs that need not survive a
    power cut.

    Example::

        bucket = open_bucket("runs/demo/bucket", create=True)
        bucket.create("a", b"1")
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        super().__init__(LocalStore(folder), "file://" + quote(str(folder)), local=True)
        self.folder = folder
        self.durable = durable
        self.ignores_case = ignores_case(folder)
        """True if the file system ignores case in names."""
        self._prepared: set[Path] = set()
        """Folders that are known to exist durably and to hold no abandoned temporary files."""

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        with self._errors("read", key), self._opened(key) as opened:
            if opened is None:
                return None
            descriptor, size = opened
            self._check_size(size, limit, key)
            count("read_bytes", size)
            return _read(descriptor, 0, size)

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`."""
        with self._errors("read", key), self._opened(key) as opened:
            if opened is None:
                return None
            descriptor, size = opened
            if size < max(start + length for start, length in ranges):
                raise CorruptError(
                    "the object ends within the requested range", run=self.url, key=key
                )
            count("read_bytes", sum(length for _, length in ranges))
            return [memoryview(_read(descriptor, start, length)) for start, length in ranges]

    def head(self, key: str) -> ObjectMeta | None:
        """As `Bucket.head`."""
        count("requests")
        with self._errors("read", key):
            try:
                path = self._path(key)
                status = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            if self._linked(path):
                return None
        if not stat.S_ISREG(status.st_mode):
            return None
        modified = _EPOCH + timedelta(microseconds=status.st_mtime_ns // 1000)
        return ObjectMeta(key.rstrip("/"), status.st_size, modified)

    def is_listed(self, key: str) -> bool:
        """As `Bucket.is_listed`; only the object's own folder is read."""
        with self._errors("list", key):
            path = self._path(key)
            try:
                return path in path.parent.iterdir() and path.is_file() and not self._linked(path)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def put(self, key: str, data: bytes) -> None:
        """As `Bucket.put`."""
        with self._errors("write", key):
            path = self._path(key)
            with self._temporary(path, data) as temporary:
                temporary.replace(path)
            count("written_bytes", len(data))
            self._flush_folder(path.parent)

    def create(self, key: str, data: bytes) -> bool:
        """As `Bucket.create`."""
        with self._errors("write", key):
            path = self._path(key)
            made = True
            try:
                with self._temporary(path, data) as temporary:
                    path.hardlink_to(temporary)
                count("written_bytes", len(data))
            except FileExistsError:
                made = False
            # If the object existed, its writer may have died before flushing the folder.
            self._flush_folder(path.parent)
            return made

    def _path(self, key: str) -> Path:
        """Returns the file of a key; raises `ValueError` for an invalid key."""
        parts = key.rstrip("/").split("/")
        if not all(map(_is_key_part, parts)) or _TEMPORARY.search(key):
            raise ValueError(key)
        if self.ignores_case:
            self._check_case(key, parts)
        return self.folder.joinpath(*parts)

    def _check_case(self, key: str, parts: Sequence[str]) -> None:
        """Raises `InputError` if the file system would confuse this key's file with another's."""
        folder = self.folder
        for part in parts:
            if not folder.is_dir():
                return
            names = [path.name for path in folder.iterdir()]
            if part not in names:
                twin = next((name for name in names if name.casefold() == part.casefold()), None)
                if twin is None:
                    return
                raise InputError(
                    f"{part!r} and {twin!r} differ in case only, and this file system does not "
                    "tell them apart",
                    hint="choose names that differ in more, or a folder on another file system",
                    run=self.url,
                    key=key,
                )
            folder /= part

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int] | None]:
        """Opens an object for reading: its descriptor and size, None if it does not exist.

        Without ``O_NONBLOCK``, opening a named pipe would wait forever for a writer.
        """
        count("requests")
        path = self._path(key)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        try:
            descriptor = open_beneath(self.folder, path.relative_to(self.folder).parts, flags)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if isinstance(error, NotADirectoryError) and self._linked(path):
                raise self._link_error(key) from error
            yield None
            return
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._link_error(key) from error
            # Windows cannot open folders this way.
            if not (isinstance(error, PermissionError) and path.is_dir()):
                raise
            yield None
            return
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                yield None
            elif not stat.S_ISREG(status.st_mode):
                raise CorruptError("not a regular file", run=self.url, key=key)
            else:
                yield descriptor, status.st_size
        finally:
            os.close(descriptor)

    @contextmanager
    def _temporary(self, path: Path, data: bytes) -> Iterator[Path]:
        """Writes ``data`` to a new file next to ``path``, which is removed on exit."""
        count("requests")
        self._prepare(path.parent)
        temporary = path.with_name(f"{path.name}#{secrets.randbelow(10**15)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        descriptor = os.open(temporary, flags, 0o666)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                if self.durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _prepare(self, folder: Path) -> None:
        """Makes a folder, and removes what killed processes left in it."""
        if folder in self._prepared and folder.is_dir():
            return
        if not self.folder.is_dir():
            # Made again, it would hold a run without its beginning, which no reader can use.
            raise InputError(
                f"the folder {self.folder} has disappeared",
                hint="put it back or mount it again, or choose another location",
                run=self.url,
            )
        make_folder(folder, durable=self.durable)
        if self._linked(folder):
            raise self._link_error(folder.relative_to(self.folder).as_posix())
        now = time.time()
        for path in folder.iterdir():
            if _TEMPORARY.search(path.name):
                with suppress(OSError):
                    if now - path.stat().st_mtime > ABANDONED_S:
                        path.unlink()
        self._prepared.add(folder)

    def _linked(self, path: Path) -> bool:
        """Returns whether a part of the path below the bucket's folder is a link."""
        parts = path.relative_to(self.folder).parts
        return any(self.folder.joinpath(*parts[: n + 1]).is_symlink() for n in range(len(parts)))

    def _link_error(self, key: str) -> CorruptError:
        return CorruptError(
            "a link in the bucket's folder, which is not followed",
            hint="put the file in the place of the link; the bucket's folder may be one itself",
            run=self.url,
            key=key,
        )

    def _flush_folder(self, folder: Path) -> None:
        """Flushes a folder's names to the disk."""
        if self.durable:
            flush_folder(folder)


def ignores_case(folder: Path) -> bool:
    """Returns whether a folder's file system ignores case, as macOS's and Windows' do by
    default.
    """
    for path in (folder.absolute(), *folder.absolute().parents):
        other = path.with_name(path.name.swapcase()) if path.name else path
        if other != path and path.exists():
            return other.exists() and other.samefile(path)
    return False


def make_folder(folder: Path, *, durable: bool) -> None:
    """Makes a folder and its parents; with ``durable``, they survive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent, durable=durable)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
    # Also for an existing folder: the process that made it may have died before flushing the
    # parent.
    if durable:
        flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Flushes the names that a folder holds to the disk, where the system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders; its file system flushes their names.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_key_part(part: str) -> bool:
    return part not in ("", ".", "..") and part.isprintable() and "\\" not in part


def _read(descriptor: int, start: int, length: int) -> bytes:
    """Reads exactly ``length`` bytes; raises `OSError` if the file was truncated meanwhile."""
    os.lseek(descriptor, start, os.SEEK_SET)
    parts = []
    while length:
        part = os.read(descriptor, length)
        if not part:
            raise OSError("the file was truncated while it was read")
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
