"""Ends Python code of a model's files that runs too long: chat templates may loop."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from deltawire.errors import InputError

T = TypeVar("T")

_ARRIVES_S = 1.0
"""A sent exception arrives at the next bytecode; this bounds the wait for it."""


class _OutOfTimeError(BaseException):
    """Raised inside the code that is ended; no handler for `Exception` catches it."""


def within(limit_s: float, call: Callable[[], T], *, name: str) -> T:
    """Returns ``call()``, or raises `InputError` that names it if it takes longer than ``limit_s``.

    A timer's thread raises in the calling thread between two bytecodes, so it ends loops in Python
    code, such as compiled templates, but not a single long call into C.

    An exception that was sent is waited for, never withdrawn: CPython 3.11 leaves the interpreter
    checking for one at every step if `PyThreadState_SetAsyncExc` gets NULL.

    Example::

        text = within(5.0, lambda: template.render(messages), name="the chat template")
    """
    watch = _Watch(threading.get_ident())
    timer = threading.Timer(limit_s, watch.interrupt)
    timer.daemon = True
    try:
        timer.start()
        result = call()
        watch.end()
    except _OutOfTimeError:
        watch.ended = True
        raise InputError(
            f"{name} takes more than {limit_s:g} s", hint="use a model whose template terminates"
        ) from None
    except BaseException:
        with contextlib.suppress(_OutOfTimeError):
            watch.end()
        raise
    finally:
        timer.cancel()
    return result


class _Watch:
    """Sends a thread `_OutOfTimeError`, at most once and only until `end`."""

    def __init__(self, thread: int) -> None:
        self.ended = False
        self._thread = ctypes.c_ulong(thread)
        self._sent = False
        self._lock = threading.Lock()

    def interrupt(self) -> None:
        """Sends the exception; called by the timer's thread."""
        with self._lock:
            if not self.ended:
                self._sent = True
                error = ctypes.py_object(_OutOfTimeError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, error)

    def end(self) -> None:
        """Sends nothing from now on; one that was sent is raised here unless it was swallowed."""
        with self._lock:
            self.ended = True
        deadline = time.monotonic() + _ARRIVES_S
        while self._sent and time.monotonic() < deadline:
            time.sleep(0)
