"""Ends Python code of a model's files that runs too long: chat templates may loop."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from deltawire.errors import InputError

T = TypeVar("T")


class _OutOfTimeError(BaseException):
    """Raised inside the code that is ended; no handler for `Exception` catches it."""


def within(limit_s: float, call: Callable[[], T], *, name: str) -> T:
    """Returns ``call()``, or raises `InputError` that names it if it takes longer than ``limit_s``.

    A timer's thread raises in the calling thread between two bytecodes, so it ends loops in Python
    code, such as compiled templates, but not a single long call into C.

    Example::

        text = within(5.0, lambda: template.render(messages), name="the chat template")
    """
    thread, lock, ended = ctypes.c_ulong(threading.get_ident()), threading.Lock(), [False]

    def interrupt() -> None:
        with lock:
            if not ended[0]:
                error = ctypes.py_object(_OutOfTimeError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)

    timer = threading.Timer(limit_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return call()
        finally:
            with lock:
                ended[0] = True
                # Withdraws an exception that the interpreter has not raised yet.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
            timer.cancel()
    except _OutOfTimeError:
        raise InputError(
            f"{name} takes more than {limit_s:g} s", hint="use a model whose template ends"
        ) from None
