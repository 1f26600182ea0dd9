"""Retries bucket operations that got no answer.

Retries live here only: a caller that wants them wraps its bucket once and uses it like any other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from deltawire.errors import BugError, RetryError
from deltawire.store.bucket import Bucket
from deltawire.store.delegating import DelegatingBucket, Verb

T = TypeVar("T")

RETRIES = 5
FIRST_PAUSE_S = 0.1


@dataclass(frozen=True)
class RetryPolicy:
    """How often an operation is repeated after a `RetryError`, and how long to wait between.

    ``first_pause_s`` (None is `FIRST_PAUSE_S`) doubles after each attempt. Each pause is multiplied
    by a number between 0.5 and 1.5 (``rng`` plus 0.5): ranks that a store refused at one moment
    would otherwise all ask again at one moment. ``sleep`` gets seconds; it may raise an error to
    give up.

    Example::

        bucket = RetryingBucket(bucket, RetryPolicy(retries=10, first_pause_s=0.5))
    """

    retries: int = RETRIES
    first_pause_s: float | None = None
    sleep: Callable[[float], None] = time.sleep
    rng: Callable[[], float] = random.random

    def run(self, operation: Callable[[], T]) -> T:
        """Calls ``operation``, and after a `RetryError` calls it again, at most ``retries``
        times.
        """
        pause_s = FIRST_PAUSE_S if self.first_pause_s is None else self.first_pause_s
        for attempt in range(self.retries + 1):
            try:
                return operation()
            except RetryError:
                if attempt == self.retries:
                    raise
                self.sleep(pause_s * 2**attempt * (0.5 + self.rng()))
        raise BugError("the retry loop ended without a result")


PATIENT = RetryPolicy()
"""The default for most callers: six attempts within about three seconds."""


class RetryingBucket(DelegatingBucket):
    """Repeats every operation of ``inner`` that raises `RetryError`, by ``policy``.

    A repeated `create` may find the object that its own first attempt stored, and then returns
    False: a caller that must know whose object it is reads it back and compares its nonce.
    Wrapping a `RetryingBucket` again replaces its policy instead of multiplying the attempts.

    Example::

        bucket = RetryingBucket(open_bucket("s3://bucket/run"))
        run = find_run(bucket)  # a request that times out is repeated
    """

    def __init__(self, inner: Bucket, policy: RetryPolicy = PATIENT) -> None:
        super().__init__(inner.inner if isinstance(inner, RetryingBucket) else inner)
        self.policy = policy

    @classmethod
    def over(cls, bucket: Bucket) -> Bucket:
        """Returns ``bucket`` if it already retries, by any policy, else a `RetryingBucket` around
        it.
        """
        layer = bucket
        while isinstance(layer, DelegatingBucket):
            if isinstance(layer, RetryingBucket):
                return bucket
            layer = layer.inner
        return cls(bucket)

    @staticmethod
    def beneath(bucket: Bucket) -> Bucket:
        """Returns the bucket below every layer that repeats operations, for a caller that must know
        of each attempt."""
        found = layer = bucket
        while isinstance(layer, DelegatingBucket):
            if isinstance(layer, RetryingBucket):
                found = layer.inner
            layer = layer.inner
        return found

    def _call(self, verb: Verb, key: str, operation: Callable[[], T]) -> T:  # noqa: ARG002
        return self.policy.run(operation)
