"""Finds threads that a test started and did not end."""

from __future__ import annotations

import gc
import threading
import time

GRACE_S = 60.0
"""How long a thread may take to end after its owner was closed, on a loaded machine."""

LIBRARIES = ("asyncio_", "ray_", "tqdm", "rollout-trace-logger")
"""First letters of the names of threads that libraries start and never end."""


def threads() -> set[threading.Thread]:
    """The living threads of this process."""
    return set(threading.enumerate())


def leaked(before: set[threading.Thread], grace_s: float = GRACE_S) -> list[threading.Thread]:
    """The threads that were started since ``before`` and are still alive after ``grace_s``."""
    deadline = time.monotonic() + grace_s
    while left := [one for one in threads() - before if not one.name.startswith(LIBRARIES)]:
        if time.monotonic() >= deadline:
            break
        gc.collect()  # The idle threads of an executor end when it is collected.
        left[0].join(0.1)
    return sorted(left, key=lambda thread: thread.name)


def describe(thread: threading.Thread) -> str:
    """A thread's name, and the class or function that it runs."""
    origin = getattr(thread, "_target", None) or type(thread)
    return f"{thread.name} ({origin.__module__}.{origin.__qualname__})"
