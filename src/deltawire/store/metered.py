"""Counts the bytes read from and written to a bucket, for progress bars, benchmarks and tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltawire.store.bucket import Bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.store.ranges import range_requests


@dataclass
class _ByteCounts:
    read_bytes: int = 0
    written_bytes: int = 0


class MeteredBucket(DelegatingBucket):
    """Counts the bytes that are read from and written to ``inner``.

    ``on_bytes(read, written)`` is called after each operation that moved bytes, in the thread that
    performed it. Safe for use by several threads.

    Example::

        bucket = MeteredBucket(open_bucket("s3://bucket/run"))
        find_run(bucket)
        print(bucket.read_bytes)
    """

    def __init__(self, inner: Bucket, on_bytes: Callable[[int, int], None] | None = None) -> None:
        super().__init__(inner)
        self._counted = _ByteCounts()
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    @property
    def read_bytes(self) -> int:
        """The bytes read so far."""
        return self._counted.read_bytes

    @property
    def written_bytes(self) -> int:
        """The bytes written so far."""
        return self._counted.written_bytes

    def with_inner(self, inner: Bucket) -> MeteredBucket:
        """As `DelegatingBucket.with_inner`; both count together."""
        return self._moved(inner)

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        data = self.inner.get(key, limit=limit)
        if data is not None:
            self._count(read=len(data))
        return data

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`; bytes between neighboring ranges count too."""
        parts = self.inner.read_ranges(key, ranges)
        if parts is not None:
            self._count(read=sum(one.length for one in range_requests(ranges)))
        return parts

    def put(self, key: str, data: bytes) -> None:
        """As `Bucket.put`."""
        self.inner.put(key, data)
        self._count(written=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """As `Bucket.create`."""
        made = self.inner.create(key, data)
        if made:
            self._count(written=len(data))
        return made

    def _count(self, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self._counted.read_bytes += read
            self._counted.written_bytes += written
        if self._on_bytes is not None:
            self._on_bytes(read, written)
