"""A bucket that counts what goes through it, for progress bars and for proofs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from deltawire.store.bucket import Bucket, Entry


class MeteredBucket(Bucket):
    """Passes everything on to ``inner`` and counts bytes and whole objects, each way.

    ``on_bytes(read, written)`` is called after each operation that moved any, from whichever
    thread did it. Safe for use by several threads.
    """

    def __init__(self, inner: Bucket, on_bytes: Callable[[int, int], None] | None = None) -> None:
        super().__init__(inner.store, inner.url, local=inner.local)
        self.inner = inner
        self.read_bytes = 0
        self.written_bytes = 0
        self.read_keys: dict[str, int] = {}
        """How many bytes of each key were read."""
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        data = self.inner.get(key, limit=limit)
        if data is not None:
            self._count(key, read=len(data))
        return data

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`."""
        parts = self.inner.read_ranges(key, ranges)
        if parts is not None:
            self._count(key, read=sum(map(len, parts)))
        return parts

    def put(self, key: str, data: bytes) -> None:
        """As `Bucket.put`."""
        self.inner.put(key, data)
        self._count(key, written=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """As `Bucket.create`."""
        made = self.inner.create(key, data)
        if made:
            self._count(key, written=len(data))
        return made

    def head(self, key: str) -> Entry | None:
        """As `Bucket.head`."""
        return self.inner.head(key)

    def list_objects(self, prefix: str, *, after: str | None = None) -> Sequence[Entry]:
        """As `Bucket.list_objects`."""
        return self.inner.list_objects(prefix, after=after)

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        """As `Bucket.list_prefixes`."""
        return self.inner.list_prefixes(prefix)

    def delete(self, key: str) -> None:
        """As `Bucket.delete`."""
        self.inner.delete(key)

    def _count(self, key: str, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written
            if read:
                self.read_keys[key] = self.read_keys.get(key, 0) + read
        if self._on_bytes is not None:
            self._on_bytes(read, written)
