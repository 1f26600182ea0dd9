"""Counts what this process asks of its stores, for its heartbeat and for reports of readers.

Counted where a request is sent, so that layers above change nothing: repetitions and refusals
count, too. The counts are those of all stores that the process uses.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Traffic:
    """The counts of a process since it started.

    ``requests`` count each attempt, of which ``retries`` repeated an earlier one, and the store
    refused ``refused`` because there were too many. ``cache_hits`` blobs came from the cache of the
    host, and ``cache_misses`` had to be fetched for it. ``anchors`` were stored, and ``pruned``
    versions deleted.

    Example::

        before = traffic().requests
    """

    requests: int = 0
    retries: int = 0
    refused: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    anchors: int = 0
    pruned: int = 0


_COUNTS = dict.fromkeys(Traffic.__dataclass_fields__, 0)
_LOCK = threading.Lock()


def count(name: str, number: int = 1) -> None:
    """Adds to the count of this name."""
    with _LOCK:
        _COUNTS[name] += number


def traffic() -> Traffic:
    """Returns the counts of this process."""
    with _LOCK:
        return replace(Traffic(), **_COUNTS)
