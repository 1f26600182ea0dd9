"""Spool: rows that wait on disk until they are uploaded.

Concurrency::

    event loop                       writer thread                       uploader's thread
      append(row) ──▶ queue ──▶ write all that wait, one fsync            sealed(), read()
      on_stored(ok) ◀──────────  then call back                           upload, then remove()
                                 seal: <n>.open is renamed <n>.rows

A row counts as stored once it is synced to disk; a process that is killed afterwards loses
nothing. On opening, a segment that was being written is cut after its last whole row and sealed.
Each row is 4 bytes of length, 8 of BLAKE3, and its bytes. Numbers of segments never repeat, also
after all files were uploaded and removed: the file ``next`` holds a number that none was given.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from deltawire.errors import CorruptError, InputError
from deltawire.private_files import open_private, private_folder, read_private, replace_private
from deltawire.wire.captures import MAX_ROWS, MAX_SEGMENT_BYTES

SEGMENT_BYTES = 8 << 20
"""A segment is sealed once it is larger."""
MAX_ROW_BYTES = 64 << 20
WAITING_ROWS = 4096
"""Rows that wait for the writer, at most: more mean that the disk hangs."""

_HEAD = struct.Struct("<I8s")
_LOG = logging.getLogger("deltawire.live")

OnStored = Callable[[bool], object]
CallBack = Callable[[Callable[[], None]], object]


class _Rows(NamedTuple):
    rows: list[bytes]
    on_stored: OnStored | None


class Spool:
    """A bounded, durable queue of rows in a folder of this process.

    ``limit_bytes`` bounds all segments together; further rows are refused and counted in ``lost``,
    and so are rows that the disk refuses. ``call_back`` runs the callbacks of a group of rows; an
    event loop passes ``loop.call_soon_threadsafe``.

    Example::

        spool = Spool(Path("state/captures"), limit_bytes=1 << 30)
        spool.append(row, lambda stored: print(stored))
        spool.seal().result()
        rows = spool.read(spool.sealed()[0])
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        call_back: CallBack = lambda call: call(),
    ) -> None:
        self.lost = 0
        self.stored = 0
        self._folder = private_folder(folder)
        self._limit = limit_bytes
        self._call_back = call_back
        self._queue: queue.Queue[_Rows | Future[None] | None] = queue.Queue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._file: int | None = None
        self._written = self._rows = 0
        self._recover()
        self._next = self._first_free()
        self._bytes = sum(path.stat().st_size for path in self._folder.glob("*.rows"))
        self._thread = threading.Thread(target=self._write, name="spool", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """The bytes on disk, and of rows that wait for it."""
        with self._lock:
            return self._bytes

    def append(self, data: bytes, on_stored: OnStored | None = None) -> None:
        """Stores a row; ``on_stored`` is called with whether it is on disk."""
        self.append_all([data], on_stored)

    def append_all(self, rows: list[bytes], on_stored: OnStored | None = None) -> None:
        """Stores several rows, all of them or none, and calls ``on_stored`` once."""
        if not rows:
            return
        size = sum(_HEAD.size + len(row) for row in rows)
        with self._lock:
            full = self._bytes + size > self._limit or self._waiting >= WAITING_ROWS
            refused = full or size > MAX_ROW_BYTES or not self._thread.is_alive()
            if refused:
                self.lost += len(rows)
            else:
                self._bytes += size
                self._waiting += len(rows)
                self._queue.put(_Rows(rows, on_stored))
        if refused and on_stored is not None:
            on_stored(False)

    def seal(self) -> Future[None]:
        """Ends the segment that is being written, so that it can be uploaded."""
        done: Future[None] = Future()
        self._queue.put(done)
        return done

    def sealed(self) -> list[int]:
        """Returns the numbers of the segments that can be uploaded, oldest first."""
        return sorted(int(path.stem) for path in self._folder.glob("*.rows"))

    def read(self, number: int) -> list[bytes]:
        """Returns the rows of a sealed segment; raises `CorruptError` if it is damaged."""
        data = read_private(self._path(number), MAX_SEGMENT_BYTES) or b""
        rows, end = _rows_of(data)
        if end != len(data) or not rows:
            raise CorruptError(f"the spooled segment {self._path(number)} is damaged")
        return rows

    def remove(self, number: int) -> None:
        """Deletes a sealed segment."""
        path = self._path(number)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            with self._lock:
                self._bytes -= size

    def set_aside(self, number: int) -> None:
        """Renames a damaged segment, so that the others are uploaded."""
        with contextlib.suppress(FileNotFoundError):
            self._path(number).rename(self._path(number).with_suffix(".damaged"))

    def remove_damaged(self) -> None:
        """Deletes the segments that were set aside."""
        for path in self._folder.glob("*.damaged"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stores what waits, seals the segment and ends the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout=60)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010d}.rows"

    def _recover(self) -> None:
        for path in self._folder.glob("*.open"):
            data = read_private(path, MAX_SEGMENT_BYTES) or b""
            rows, end = _rows_of(data)
            if not rows:
                path.unlink()
                continue
            os.truncate(path, end)
            path.rename(path.with_suffix(".rows"))

    def _first_free(self) -> int:
        stated = read_private(self._folder / "next", 64)
        try:
            first = int(stated or b"0")
        except ValueError as error:
            raise InputError(
                f"{self._folder / 'next'} holds no number", hint="it was written by another program"
            ) from error
        return max([first, *(number + 1 for number in self.sealed())])

    def _write(self) -> None:
        """Write groups of rows until `close`."""
        ended = False
        while not ended:
            items = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(items) < WAITING_ROWS:
                    items.append(self._queue.get_nowait())
            groups = [item for item in items if isinstance(item, _Rows)]
            if groups:
                self._store(groups)
            seals = [item for item in items if isinstance(item, Future)]
            ended = None in items
            if seals or ended:
                self._seal()
            for seal in seals:
                seal.set_result(None)

    def _store(self, groups: list[_Rows]) -> None:
        rows = [row for group in groups for row in group.rows]
        data = b"".join(_HEAD.pack(len(row), _check(row)) + row for row in rows)
        try:
            if self._written and (
                self._written + len(data) > SEGMENT_BYTES or self._rows + len(rows) > MAX_ROWS
            ):
                self._seal()
            if self._file is None:
                self._open()
            assert self._file is not None
            _write_all(self._file, data)
            os.fsync(self._file)
            stored = True
            self._written += len(data)
            self._rows += len(rows)
        except (OSError, InputError) as error:
            stored = False
            _LOG.error("cannot write the spool: %s", getattr(error, "strerror", None) or error)
            self._undo()
        with self._lock:
            self._waiting -= len(rows)
            self._bytes -= 0 if stored else len(data)
            self.stored += len(rows) if stored else 0
            self.lost += 0 if stored else len(rows)
        calls = [group.on_stored for group in groups if group.on_stored is not None]

        def notify() -> None:
            for call in calls:
                call(stored)

        with contextlib.suppress(RuntimeError):  # The event loop may be closed already.
            self._call_back(notify)

    def _open(self) -> None:
        replace_private(self._folder / "next", b"%d\n" % (self._next + 1))
        path = self._path(self._next).with_suffix(".open")
        self._file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        _sync_folder(self._folder)
        self._written = self._rows = 0

    def _seal(self) -> None:
        if self._file is None:
            return
        os.close(self._file)
        path = self._path(self._next)
        if self._rows:
            path.with_suffix(".open").rename(path)
        else:
            path.with_suffix(".open").unlink(missing_ok=True)
        self._file = None
        self._next += 1

    def _undo(self) -> None:
        """Cut a half-written group off; if the disk refuses that too, a reader cuts it off."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._written)
            with contextlib.suppress(OSError):
                os.lseek(self._file, self._written, os.SEEK_SET)


def _check(data: bytes) -> bytes:
    return blake3(data).digest(8)


def _rows_of(data: bytes) -> tuple[list[bytes], int]:
    """Returns the whole rows at the start of ``data``, and where they end."""
    rows: list[bytes] = []
    at = 0
    while at + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, at)
        row = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(row) != length or not length or _check(row) != check:
            break
        rows.append(row)
        at += _HEAD.size + length
    return rows, at


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
