"""Keeps the blobs of deltas in a folder that the readers of one host share.

The ranks of an engine need overlapping parts of a delta: where a row-major matrix is split by
columns, each rank needs all of its chunks. With a cache, whichever rank asks for a blob first
fetches it whole, and the others read their parts from the folder, so a host fetches each blob once
however many ranks it has.

Concurrency::

    rank 0                 rank 1                         folder
      claims blob 3          claims blob 7                  BLAKE3.part, locked
      fetches, checks it     fetches, checks it
      renames it ─────────────────────────────────────────▶ BLAKE3
      reads pieces of 7 ◀──────────────────────────────── (waits while it is locked)
      thread: touches the unfinished files every second

A claim is a lock on the unfinished file, which the system releases when its owner dies. The files
of a process that was stopped, or of a fetch that hangs, are not touched any more, and others then
fetch these blobs. Readers begin with different blobs, so that together they fetch many at once.
Files are named by the BLAKE3 of their content and every piece is checked against its hash, so a
damaged file costs its bytes once more and nothing else. Without space in the folder, each reader
fetches each blob.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from blake3 import blake3

from deltawire.errors import InputError
from deltawire.private_files import OtherUsersError, open_private, private_folder
from deltawire.store import Bucket
from deltawire.store.host_limit import LAYOUT, HostLimit
from deltawire.store.request_limit import refused_ago_s, share_limit
from deltawire.store.traffic import count
from deltawire.sync.chain.objects import get_blob
from deltawire.wire.payload import BlobRef

FOLDER = "DELTAWIRE_BLOB_CACHE"
"""The environment variable that names the folder; without it, there is no cache."""

GIGABYTES = "DELTAWIRE_BLOB_CACHE_GB"
"""The environment variable with the limit, in 10^9 bytes."""

LIMIT_BYTES = 8 * 10**9

WAIT_S = 5.0
"""Seconds during which other readers wait for a claim whose owner does not touch it. A process that
was stopped touches none of its claims, so it costs each reader this once."""

TOUCH_S = 1.0

FETCH_S = 60.0
"""How long a fetch is touched, and longer if the store refuses requests: others would have to wait
for it as long."""

PAUSE_S = 0.005

PART = ".part"
"""The end of an unfinished file's name."""

READ_BYTES = 1 << 30
"""The most bytes that one read of a file asks for: Linux returns at most 2 GiB - 4 KiB of them."""

_LOG = logging.getLogger("deltawire.sync")

_BLOB = re.compile("[0-9a-f]{64}")

ABANDONED_S = 600.0
"""The age in seconds at which an unfinished file is deleted."""


class BlobCache:
    """Blobs of ``bucket`` in ``folder``, at most ``limit_bytes``: the oldest are deleted first.

    Usable by several threads, objects and processes at once, of several runs too. ``folder`` must
    be on a local disk or in main memory, such as ``/dev/shm/deltawire``; a missing one is made.
    ``fetched_bytes`` and ``shared_bytes`` count what this object fetched from the bucket, and what
    it read from files.

    Raises `InputError` if the folder is a link, or if other users may write into it.

    Example::

        cache = BlobCache(bucket, Path("/dev/shm/deltawire"))
        parts = cache.read(ref, [(0, 100)])
    """

    def __init__(self, bucket: Bucket, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.bucket = bucket
        self.folder = private_folder(folder)
        self.limit_bytes = limit_bytes
        self.fetched_bytes = 0
        self.shared_bytes = 0
        self._counting = threading.Lock()
        self._begin = random.random()

    @property
    def limit_path(self) -> Path:
        """The file of the window of requests that the readers of this host share."""
        parts = urlsplit(self.bucket.url)
        place = blake3(f"{parts.scheme}://{parts.netloc}".encode()).hexdigest(8)
        return self.folder / f"limit-{LAYOUT}-{place}"

    def takes(self, size: int) -> bool:
        """Returns whether the cache holds a version of ``size`` bytes and the one before. It would
        delete blobs of larger ones that some readers have not read yet."""
        return 2 * size <= self.limit_bytes

    def order(self, numbers: Sequence[int]) -> deque[int]:
        """Returns the numbers of blobs in the order in which this reader takes them."""
        found = deque(numbers)
        found.rotate(-int(self._begin * len(found)))
        return found

    def read(self, ref: BlobRef, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """Returns the bytes of each ``(start, length)`` of a blob, from its file or from the
        bucket. Those from a file are not checked: `drop` a blob that turns out to be damaged.

        Returns None if another reader claimed the blob and has not touched its claim for `WAIT_S`.
        Raises as `get_blob`.
        """
        while True:
            parts = self._read_file(ref, ranges)
            if parts is not None:
                count("cache_hits")
                with self._counting:
                    self.shared_bytes += sum(length for _, length in ranges)
                return parts
            data = self._fetch_locked(ref)
            if data is not None:
                whole = memoryview(data)
                return [whole[start : start + length] for start, length in ranges]
            if self._untouched_s(ref) > WAIT_S:
                return None
            time.sleep(PAUSE_S)

    def get(self, ref: BlobRef) -> bytes | None:
        """Returns all of a blob, checked; otherwise as `read`."""
        for _ in range(2):
            parts = self.read(ref, [(0, ref.bytes)])
            if parts is None:
                break
            if blake3(parts[0]).hexdigest() == ref.hash:
                return bytes(parts[0])
            self.drop(ref)
        return None

    def drop(self, ref: BlobRef) -> None:
        """Deletes a blob's file, whose content is not the blob's."""
        with suppress(OSError):
            self._path(ref).unlink()

    def _path(self, ref: BlobRef) -> Path:
        return self.folder / ref.hash

    def _untouched_s(self, ref: BlobRef) -> float:
        """Returns how long ago the claim on a blob was touched, 0 without one."""
        try:
            return time.time() - self._unfinished(ref).lstat().st_mtime
        except OSError:
            return 0.0

    def _unfinished(self, ref: BlobRef) -> Path:
        return self.folder / f"{ref.hash}{PART}"

    def _read_file(
        self, ref: BlobRef, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview] | None:
        try:
            descriptor = open_private(self._path(ref), os.O_RDONLY)
        except (OSError, InputError):
            return None
        try:
            parts = [_read_range(descriptor, start, length) for start, length in ranges]
        except OSError:
            return None
        finally:
            os.close(descriptor)
        if any(len(part) != length for part, (_, length) in zip(parts, ranges, strict=True)):
            self.drop(ref)
            return None
        return parts

    def _fetch_locked(self, ref: BlobRef) -> bytes | bytearray | None:
        """Fetches a blob and stores its file; returns None if another reader does so, or has."""
        unfinished = self._unfinished(ref)
        try:
            descriptor = open_private(unfinished, os.O_RDWR | os.O_CREAT)
        except (OSError, InputError):
            return self._fetch(ref)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return None
            if not _names(unfinished, descriptor):
                return None
            if self._path(ref).exists():
                unfinished.unlink()
                return None
            stored = False
            try:
                os.utime(descriptor)  # The claim begins now, whoever made the file.
                with _CLAIMS.touched(descriptor, self.bucket.url):
                    data = self._fetch(ref)
                stored = self._store(descriptor, unfinished, ref, data)
                return data
            finally:
                if not stored and _names(unfinished, descriptor):
                    unfinished.unlink()
        finally:
            os.close(descriptor)

    def _fetch(self, ref: BlobRef) -> bytes | bytearray:
        data = get_blob(self.bucket, ref)
        count("cache_misses")
        with self._counting:
            self.fetched_bytes += len(data)
        return data

    def _store(
        self, descriptor: int, unfinished: Path, ref: BlobRef, data: bytes | bytearray
    ) -> bool:
        """Stores a blob's file and returns whether there was space for it."""
        try:
            self._make_room(len(data))
            os.ftruncate(descriptor, 0)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if _names(unfinished, descriptor):
                unfinished.replace(self._path(ref))
                return True
        except OSError:
            pass
        return False

    def _make_room(self, size: int) -> None:
        """Deletes the oldest blobs until ``size`` bytes more are within the limit, and unfinished
        ones of readers that were killed. Other files in the folder are left alone."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    name = entry.name.removesuffix(PART)
                    if not _BLOB.fullmatch(name) or not stat.S_ISREG(state.st_mode):
                        continue
                    if name == entry.name:
                        found.append((state.st_mtime_ns, state.st_size, entry.path))
                    elif time.time() - state.st_mtime > ABANDONED_S:
                        Path(entry.path).unlink()
        total = sum(length for _, length, _ in found) + size
        for _, length, path in sorted(found):
            if total <= self.limit_bytes:
                return
            with suppress(OSError):
                Path(path).unlink()
            total -= length


class _Claims:
    """Touches the unfinished files of this process every `TOUCH_S` from a thread, which ends when
    there are none."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[float, str]] = {}
        """When each file was claimed, and the URL of its bucket."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def touched(self, descriptor: int, url: str) -> Iterator[None]:
        """Touches a file within the context."""
        with self._lock:
            self._held[descriptor] = time.monotonic(), url
            if self._thread is None or not self._thread.is_alive():  # Also in a forked child.
                self._thread = threading.Thread(target=self._run, name="claims", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._held[descriptor]
                if not self._held:
                    self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait(TOUCH_S)
            with self._lock:
                self._changed.clear()
                if not self._held:
                    self._thread = None
                    return
                for descriptor, (began, url) in self._held.items():
                    if time.monotonic() - began < FETCH_S or refused_ago_s(url) < FETCH_S:
                        with suppress(OSError):
                            os.utime(descriptor)


_CLAIMS = _Claims()


def _read_range(descriptor: int, start: int, length: int) -> memoryview:
    """Reads a range of a file, in several pieces if it is large; it is shorter if the file ends."""
    first = os.pread(descriptor, min(length, READ_BYTES), start)
    if len(first) == length:
        return memoryview(first)
    found = bytearray(first)
    while len(found) < length:
        part = os.pread(descriptor, min(length - len(found), READ_BYTES), start + len(found))
        if not part:
            break
        found += part
    return memoryview(found)


def _names(path: Path, descriptor: int) -> bool:
    """Returns whether a path still names an open file, which another reader may have renamed."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def configured_cache(bucket: Bucket) -> BlobCache | None:
    """Returns a cache of ``bucket`` in the folder that the environment names (`FOLDER`,
    `GIGABYTES`); None if it names none, the bucket is on this host, or the folder belongs to
    another user, which is logged: readers then fetch each blob.

    Raises `InputError` if the folder cannot be used, or the limit is no number above 0.
    """
    folder = os.environ.get(FOLDER, "")
    if not folder or bucket.local:
        return None
    stated = os.environ.get(GIGABYTES, "")
    try:
        limit = float(stated) * 1e9 if stated else float(LIMIT_BYTES)
    except ValueError:
        limit = -1.0
    if not 0 < limit < 2**60:
        raise InputError(
            f"{GIGABYTES} is {stated[:40]!r}",
            hint="give the limit of the cache in GB, such as 8",
        )
    if not Path(folder).is_absolute():
        raise InputError(
            f"{FOLDER} is {folder[:200]!r}",
            hint="give an absolute path, such as /dev/shm/deltawire",
        )
    try:
        cache = BlobCache(bucket, Path(folder), int(limit))
        share_limit(bucket.url, lambda: HostLimit(cache.limit_path))
        return cache
    except OtherUsersError as error:
        _LOG.warning("blobs are not shared with the other readers of this host: %s", error)
        return None
