"""Shares one window of requests between the processes of a host, in a file.

Readers that share a folder of blobs (`deltawire.sync.follow.blob_cache`) ask a store together for
what one reader needs, so they have one window together, too.

Concurrency::

    process 0                         file                            process 1
      lock, read, room? ◀──────────── window, requests under way ───▶   the same
      count one more, unlock          of each process
      … request …
      lock, answered or refused, count one less, unlock

The lock is held for microseconds. A process that was stopped with it, or with requests under way,
is not waited for: after `LOCK_S` a process goes on with what it knows itself, and what another one
has under way counts for `UNDER_WAY_S`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deltawire.private_files import open_private
from deltawire.store.request_limit import Outcome, RequestLimit, RequestWindow

LOCK_S = 1.0
UNDER_WAY_S = 30.0
NAP_S = 0.02
"""A process cannot wake another one, so each that waits looks again after so long."""
PROCESSES = 256
"""The most processes that share a window; further ones see the others' requests only."""

_WINDOW = struct.Struct(f"<{len(RequestWindow().state())}d")
_PROCESS = struct.Struct("<qqd")
"""The id of a process, its requests under way, and when it began the last one."""
_BYTES = _WINDOW.size + PROCESSES * _PROCESS.size
LAYOUT = _WINDOW.size
"""A part of the file's name: releases with other windows must not take over each other's."""


class HostLimit(RequestLimit):
    """The limit of a store for all processes of this host that name the same file.

    Raises `OSError` or `InputError` if the file cannot be used.

    Example::

        limit = HostLimit(Path(f"/dev/shm/deltawire/limit-{LAYOUT}"))
        with limit.request(outcome_of):
            ...  # send one request
    """

    nap_s = NAP_S

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock=clock)
        self._file = open_private(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._file, _BYTES)
        self._state = mmap.mmap(self._file, _BYTES)
        self._pid, self._mine, self._began = 0, 0, 0.0

    def _admit(self, *, bulk: bool) -> float:
        with self._shared():
            wait_s = super()._admit(bulk=bulk)
            if wait_s <= 0:
                self._mine, self._began = self._mine + 1, self._clock()
            return wait_s

    def _end(self, outcome: Outcome, began: float, size: int | None) -> None:
        with self._shared():
            self._mine = max(self._mine - 1, 0)
            super()._end(outcome, began, size)

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Works on the state that all processes share; on this one's if the lock is not had."""
        if self._pid != os.getpid():  # Also in a forked child.
            self._pid, self._mine = os.getpid(), 0
            self._begun.clear()
        if not self._locked():
            yield
            return
        try:
            self._load()
            yield
            self._store()
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _locked(self) -> bool:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            else:
                return True

    def _load(self) -> None:
        now = self._clock()
        self.window.restore(_WINDOW.unpack_from(self._state, 0), now)
        others = 0
        for at in range(_WINDOW.size, _BYTES, _PROCESS.size):
            pid, count, began = _PROCESS.unpack_from(self._state, at)
            if pid != self._pid and count > 0 and 0 <= now - began < UNDER_WAY_S:
                others += count
        self._under_way = self._mine + others

    def _store(self) -> None:
        _WINDOW.pack_into(self._state, 0, *self.window.state())
        now, free = self._clock(), -1
        for at in range(_WINDOW.size, _BYTES, _PROCESS.size):
            pid, count, began = _PROCESS.unpack_from(self._state, at)
            if pid == self._pid:
                free = at
                break
            unused = count <= 0 or not 0 <= now - began < UNDER_WAY_S
            free = at if free < 0 and unused else free
        if free >= 0:
            _PROCESS.pack_into(self._state, free, self._pid, self._mine, self._began)
