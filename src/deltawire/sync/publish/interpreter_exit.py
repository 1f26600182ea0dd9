"""Commits staged versions when the interpreter ends or the process is told to.

Concurrency::

    main thread: return, sys.exit, an exception, Ctrl-C          SIGTERM, without another handler
      └▶ threading._shutdown                                       └▶ main thread
           ├▶ this module: wait for each staged version                  wait, `TERM_WAIT_S` in all
           │   and stop the workers, `STOP_WAIT_S` in all
           ├▶ concurrent.futures: refuses tasks, joins threads           end by SIGTERM
           └▶ joins the threads that are no daemons
         atexit callbacks

``atexit`` would be too late: pools of threads refuse tasks by then. A publisher that is used after
this module's turn, by another thread, commits each version before `publish` returns. A forked child
forgets the versions of its parent. After SIGKILL or ``os._exit`` nothing runs; the next start names
the version (see `announcement`).
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # Registers its end first, so that it runs last.
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Protocol
from weakref import WeakSet

TERM_WAIT_S = 8.0
"""How long SIGTERM waits for all versions: launchers kill a process 10 to 30 s after it."""

STOP_WAIT_S = 8.0
"""How long an end of the interpreter waits for threads that work in the background."""


class Background(Protocol):
    """A thread whose work may be left undone.

    Python ends a thread that returns from native code while the interpreter ends, and the process
    with it: SIGABRT, whatever the program's own status.
    """

    def stop(self, limit_s: float) -> None:
        """Asks the thread to end, and waits for it at most ``limit_s`` seconds."""
        ...


class Unfinished(Protocol):
    """Something that holds a version which may not be committed yet."""

    def finish(self, limit_s: float | None) -> None:
        """Waits until the version is committed, at most ``limit_s`` seconds; tells if it is not."""
        ...


class _Exit:
    """The state of this process. There is one."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.ending = False
        self.staged: dict[int, Unfinished] = {}
        """Holders of a version that is not committed, and of whose failure no caller knows."""
        self.failed: WeakSet[Unfinished] = WeakSet()
        """Holders whose callers know of the failure, and may have dropped them."""
        self.open: WeakSet[object] = WeakSet()
        self.workers: WeakSet[Background] = WeakSet()

    def after_fork(self) -> None:
        """Forgets what belongs to the parent."""
        self.process = os.getpid()
        self.ending = False
        self.staged = {}
        self.failed = WeakSet()
        self.workers = WeakSet()
        if self.open:
            self.open = WeakSet()
            _restore_handler()


_exit = _Exit()


def ending() -> bool:
    """Returns whether the interpreter ends: no thread may be relied on any more."""
    return _exit.ending


def staged(holder: Unfinished) -> None:
    """Remembers a holder of a version that has to be committed before the process ends."""
    _exit.staged[id(holder)] = holder
    _exit.failed.discard(holder)


def committed(holder: Unfinished) -> None:
    """Forgets a holder whose version is committed, or that is closed."""
    _exit.staged.pop(id(holder), None)
    _exit.failed.discard(holder)


def told(holder: Unfinished) -> None:
    """Keeps a holder only while its owner does: the owner has got the error."""
    if _exit.staged.pop(id(holder), None) is not None:
        _exit.failed.add(holder)


def works(worker: Background) -> None:
    """Stops a worker before the interpreter ends. A worker that ended by itself may stay here."""
    _exit.workers.add(worker)


def opened(publisher: object) -> None:
    """Handles SIGTERM from now on, unless the program does; only the main thread can set this."""
    _exit.open.add(publisher)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        with suppress(ValueError):  # Not the main thread, or not the main interpreter.
            signal.signal(signal.SIGTERM, _on_term)


def closed(publisher: object) -> None:
    """Leaves SIGTERM to the system again once no publisher is open."""
    _exit.open.discard(publisher)
    if not _exit.open:
        _restore_handler()


def report(line: str) -> None:
    """Writes a line to stderr, also within a signal handler that interrupted another write."""
    with suppress(Exception):  # There may be no stderr any more.
        sys.stderr.flush()
    with suppress(Exception):
        os.write(sys.stderr.fileno(), f"deltawire: {line}\n".encode())
        return
    with suppress(Exception):  # A stderr without a file, as in a notebook.
        sys.stderr.write(f"deltawire: {line}\n")


def _restore_handler() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_term:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _finish(limit_s: float | None = None) -> None:
    """Waits for all staged versions, together at most ``limit_s`` seconds."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    for holder in [*_exit.staged.values(), *_exit.failed]:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        holder.finish(left)


def _stop_workers() -> None:
    deadline = time.monotonic() + STOP_WAIT_S
    for worker in list(_exit.workers):
        worker.stop(max(deadline - time.monotonic(), 0.0))


def _at_exit() -> None:
    # multiprocessing ends its forked children through here too.
    if os.getpid() == _exit.process:
        _exit.ending = True
        with suppress(KeyboardInterrupt):
            _finish()
            _stop_workers()


def _on_term(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)  # A second one ends the process at once.
    if os.getpid() == _exit.process:
        with suppress(KeyboardInterrupt):
            _finish(TERM_WAIT_S)
    os.kill(os.getpid(), number)


# Runs before the callback of concurrent.futures: the last one that registers is called first.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_exit.after_fork)
