"""Simulates a distant object store over another bucket: latency, and limits on requests a second.

Concurrency::

    many callers' threads
      a request ─▶ counted against the rate ─▶ refused like a 503, or done on ``inner``
                                            └▶ the thread sleeps for the latency

Requests do not wait for each other: a store that answers each in 20 ms answers a thousand at once
in 20 ms, as far as its rates allow. So a caller that sends one request after another shows.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from deltawire.errors import RetryError
from deltawire.store import Bucket, DelegatingBucket, ObjectMeta
from deltawire.store.delegating import Verb
from deltawire.store.ranges import AT_ONCE, range_requests

T = TypeVar("T")

LATENCY_S = 0.02
READS_PER_S = 5500.0
"""GET and HEAD requests a second that S3 states for one prefix."""
WRITES_PER_S = 3500.0
"""PUT, LIST and DELETE requests a second that S3 states for one prefix."""
PAGE_KEYS = 1000
"""Keys that one request of a listing returns."""
_READS = frozenset({"get", "range", "head"})


class SimulatedBucket(DelegatingBucket):
    """Answers like ``inner``, after ``latency_s`` a request, and at most so many a second.

    Requests beyond ``reads_per_s`` or ``writes_per_s`` raise `RetryError`, as a store answers 503;
    a second's worth may come at once. ``bytes_per_s`` limits each connection, 0 means no limit.
    ``requests`` counts requests by verb, pages of listings and ranges included, ``refused`` those
    beyond the rates, and ``most_at_once`` is the largest number that was under way together.

    Example::

        bucket = SimulatedBucket(open_bare_bucket("memory://"), latency_s=0.02)
        bucket.put("a", b"1")
        print(bucket.requests["put"], bucket.refused)
    """

    def __init__(
        self,
        inner: Bucket,
        *,
        latency_s: float = LATENCY_S,
        reads_per_s: float = READS_PER_S,
        writes_per_s: float = WRITES_PER_S,
        bytes_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.local = False
        self.requests: Counter[Verb] = Counter()
        self.refused = 0
        self.most_at_once = 0
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._rates = {True: reads_per_s, False: writes_per_s}
        self._left = dict(self._rates)
        self._clock = clock
        self._sleep = sleep
        self._filled_at = clock()
        self._at_once = 0
        self._lock = threading.Lock()

    @property
    def total_requests(self) -> int:
        """The requests of all verbs."""
        return sum(self.requests.values())

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        data = super().get(key, limit=limit)
        self._transfer(len(data or b""))
        return data

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`, by the same requests, some of them at once."""
        parts = super().read_ranges(key, ranges)
        requests = range_requests(ranges)
        waves = -(-len(requests) // AT_ONCE)
        self._more("range", len(requests) - 1, waits=waves - 1)
        self._transfer(max(one.length for one in requests) * waves)
        return parts

    def put(self, key: str, data: bytes) -> None:
        """As `Bucket.put`."""
        super().put(key, data)
        self._transfer(len(data))

    def create(self, key: str, data: bytes) -> bool:
        """As `Bucket.create`."""
        made = super().create(key, data)
        self._transfer(len(data))
        return made

    def list_objects(self, prefix: str, *, after: str | None = None) -> Sequence[ObjectMeta]:
        """As `Bucket.list_objects`, one request after another for pages of `PAGE_KEYS` keys."""
        found = super().list_objects(prefix, after=after)
        further = max(len(found) - 1, 0) // PAGE_KEYS
        self._more("list", further, waits=further)
        return found

    def _call(self, verb: Verb, key: str, operation: Callable[[], T]) -> T:
        self._count(verb, 1, key)
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._sleep(self._latency_s)
            return operation()
        finally:
            with self._lock:
                self._at_once -= 1

    def _more(self, verb: Verb, requests: int, *, waits: int) -> None:
        """Adds ``requests`` of the operation just made, which take ``waits`` further latencies."""
        if requests > 0:
            self._count(verb, requests, "")
        if waits > 0:
            self._sleep(self._latency_s * waits)

    def _transfer(self, size: int) -> None:
        if self._bytes_per_s and size:
            self._sleep(size / self._bytes_per_s)

    def _count(self, verb: Verb, requests: int, key: str) -> None:
        """Counts requests; raises `RetryError` for those that exceed the rate."""
        kind = verb in _READS
        with self._lock:
            self.requests[verb] += requests
            now = self._clock()
            for each, rate in self._rates.items():
                self._left[each] = min(self._left[each] + rate * (now - self._filled_at), rate)
            self._filled_at = now
            self._left[kind] -= requests
            refused = self._left[kind] < 0
            if refused:
                self._left[kind] += requests
                self.refused += requests
        if refused:
            self._sleep(self._latency_s)
            raise RetryError(
                f"cannot {verb}: more requests than the store's limit", run=self.url, key=key
            )
