"""Retries operations on a bucket that does not answer.

Retries live here only: whoever wants patience wraps a bucket once, and calls it like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deltawire.errors import BugError, RetryError
from deltawire.store.bucket import Bucket, Entry

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How often an operation is repeated after a `RetryError`, and how long to wait between.

    ``first_pause_s`` doubles after each attempt. ``sleep`` gets seconds; it may raise to give up.
    """

    retries: int = 5
    first_pause_s: float = 0.1
    sleep: Callable[[float], None] = time.sleep

    def run(self, operation: Callable[[], T]) -> T:
        """Call ``operation``; on `RetryError` call it again, at most ``retries`` more times."""
        for attempt in range(self.retries + 1):
            try:
                return operation()
            except RetryError:
                if attempt == self.retries:
                    raise
                self.sleep(self.first_pause_s * 2**attempt)
        raise BugError("the retry loop ended without a result")


PATIENT = RetryPolicy()
"""What most callers want: six attempts within about three seconds."""


class RetryingBucket(Bucket):
    """Passes every operation on to ``inner`` and repeats it on `RetryError`, by ``policy``.

    A repeated `create` may find the object that its own first attempt stored, and then returns
    False: a caller that must know whose object it is reads it back and compares its nonce.
    Wrapping a `RetryingBucket` again replaces its policy instead of multiplying the attempts.

    Example::

        bucket = RetryingBucket(open_bucket("s3://bucket/run"))
        run = read_run(bucket)  # a request that times out is repeated
    """

    def __init__(self, inner: Bucket, policy: RetryPolicy = PATIENT) -> None:
        super().__init__(inner.store, inner.url, local=inner.local)
        self.inner: Bucket = inner.inner if isinstance(inner, RetryingBucket) else inner
        self.policy = policy

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        return self.policy.run(lambda: self.inner.get(key, limit=limit))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`."""
        return self.policy.run(lambda: self.inner.read_ranges(key, ranges))

    def put(self, key: str, data: bytes) -> None:
        """As `Bucket.put`."""
        self.policy.run(lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """As `Bucket.create`, with the caution that the class states."""
        return self.policy.run(lambda: self.inner.create(key, data))

    def head(self, key: str) -> Entry | None:
        """As `Bucket.head`."""
        return self.policy.run(lambda: self.inner.head(key))

    def list_objects(self, prefix: str, *, after: str | None = None) -> Sequence[Entry]:
        """As `Bucket.list_objects`."""
        return self.policy.run(lambda: self.inner.list_objects(prefix, after=after))

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        """As `Bucket.list_prefixes`."""
        return self.policy.run(lambda: self.inner.list_prefixes(prefix))

    def delete(self, key: str) -> None:
        """As `Bucket.delete`."""
        self.policy.run(lambda: self.inner.delete(key))
