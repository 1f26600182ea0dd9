"""Prefetches the blobs of the next steps of a route in parallel, from a network store.

Without it, a reader that lags by several versions waits for one round trip per version, and never
catches up with a faster publisher.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from deltawire.store import Bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.store.lanes import in_lane
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.follow.blob_cache import BlobCache
from deltawire.wire import keys
from deltawire.wire.payload import BlobRef

READERS = 8
LARGEST_BYTES = 8 << 20
"""Larger blobs take longer than a round trip and are fetched only when needed."""


class ReadAhead(DelegatingBucket):
    """Forwards operations to ``inner``; a `get` of an expected blob returns its prefetched bytes.

    Holds at most `READERS` blobs of `LARGEST_BYTES` at once. A blob whose request failed is
    requested again when it is needed. With ``cache``, blobs are fetched into it.
    """

    def __init__(self, inner: Bucket, cache: BlobCache | None = None) -> None:
        super().__init__(inner)
        self._cache = cache
        self._requests: dict[str, Future[bytes | None]] = {}
        self._threads: WorkerThreads | None = None

    def expect(self, blobs: Iterable[BlobRef]) -> None:
        """Requests these blobs, in this order, and drops all others that were requested."""
        wanted = [(keys.blob(ref.hash), ref) for ref in blobs if ref.bytes <= LARGEST_BYTES]
        wanted = wanted[:READERS]
        names = {key for key, _ in wanted}
        self._requests = {key: one for key, one in self._requests.items() if key in names}
        if len(wanted) < 2 or self.inner.local:
            return
        if self._threads is None:
            self._threads = WorkerThreads(READERS, thread_name_prefix="read-ahead")
        for key, ref in wanted:
            if key not in self._requests:
                self._requests[key] = self._threads.submit(self._fetch, key, ref)

    def _fetch(self, key: str, ref: BlobRef) -> bytes | None:
        with in_lane("bulk"):
            if self._cache is None:
                return self.inner.get(key, limit=ref.bytes)
            return self._cache.get(ref)

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        request = self._requests.pop(key, None)
        if request is not None and request.exception() is None and request.result() is not None:
            return request.result()
        return self.inner.get(key, limit=limit)
