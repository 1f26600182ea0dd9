"""A fork's bucket: reads payloads that are not there from the run above it.

A fork of a run lies below it, at ``RUN/forks/NAME``, so its place names its parent, and no object
of a bucket does. A line of a fork, ``RUN/forks/NAME/lines/LINE``, reads from ``RUN/lines/LINE``.
Only reads of immutable objects go to the parent: blobs, whose names are the
hashes of their bytes, and parts of the trainer's states, whose hashes the fork's own commits state.
Listings, sizes and writes are those of the fork, so that a writer stores again what only the parent
has, and the fork depends on its parent for what it began with and for nothing that it made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from deltawire.errors import InputError
from deltawire.store.bucket import Bucket
from deltawire.store.delegating import DelegatingBucket

FORKS: Final = "forks/"
"""The keys below a run that belong to its forks."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
_FORK = re.compile(rf"\A(.+)/forks/({_NAME})(/lines/{_NAME})?/?\Z", re.DOTALL)
_SHARED = re.compile(r"weights/blobs/[0-9a-f]{64}|checkpoints/[0-9]{10}/state-[0-9]{10}\.bin")


def split_fork(url: str) -> tuple[str, str]:
    """Returns the URL of the run that a fork belongs to, and the fork's name, from a fork's URL;
    from that of a line of a fork, the URL of the run's line. An empty name for any other URL."""
    found = _FORK.match(url)
    return (url, "") if found is None else (found[1] + (found[3] or ""), found[2])


class ForkedBucket(DelegatingBucket):
    """The bucket of a fork; ``open_upper`` opens that of its parent, once it is needed.

    Example::

        ForkedBucket(bucket, lambda: open_bucket("s3://bucket/run")).get(key, limit=100)
    """

    def __init__(self, inner: Bucket, open_upper: Callable[[], Bucket]) -> None:
        super().__init__(inner)
        self._open_upper = open_upper
        self._upper: Bucket | None = None

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        found = self.inner.get(key, limit=limit)
        if found is None and (upper := self._above(key)) is not None:
            found = upper.get(key, limit=limit)
        return found

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`."""
        found = self.inner.read_ranges(key, ranges)
        if found is None and (upper := self._above(key)) is not None:
            found = upper.read_ranges(key, ranges)
        return found

    def reconnect(self) -> None:
        """As `Bucket.reconnect`."""
        self.inner.reconnect()
        if self._upper is not None:
            self._upper.reconnect()

    def _above(self, key: str) -> Bucket | None:
        """Returns the parent's bucket for a key that it may have; None without a parent."""
        if not _SHARED.fullmatch(key):
            return None
        if self._upper is None:
            try:
                self._upper = self._open_upper()
            except InputError:
                return None  # The folder above is no bucket: the object is missing.
        return self._upper
