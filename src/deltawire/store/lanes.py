"""Says which requests of a process go first while a store refuses some of them.

Readers wait for writers, so the reads of a commit go first: they have their own window. All others
share one window, in which the many requests for blobs yield to single requests. A worker that
loads a version would otherwise get its next task only after the last blob.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Lane = Literal["first", "normal", "bulk"]


class _Calling(threading.local):
    lane: Lane = "normal"
    repeated: bool = False


_CALLING = _Calling()


def current_lane() -> Lane:
    """Returns the lane of the calling thread's requests."""
    return _CALLING.lane


@contextmanager
def in_lane(lane: Lane) -> Iterator[None]:
    """Gives the requests that this thread makes within the context a lane. Those that are first
    stay first.

    Example::

        with in_lane("bulk"):
            bucket.get(key, limit=size)
    """
    before = _CALLING.lane
    _CALLING.lane = before if before == "first" else lane
    try:
        yield
    finally:
        _CALLING.lane = before


def is_repeated() -> bool:
    """Returns whether the caller repeats this thread's requests after a refusal."""
    return _CALLING.repeated


@contextmanager
def repeated() -> Iterator[None]:
    """Says that the caller repeats refused requests, so that nothing below it does."""
    before, _CALLING.repeated = _CALLING.repeated, True
    try:
        yield
    finally:
        _CALLING.repeated = before
