"""Retries bucket operations that got no answer.

Retries live here only, and `deltawire.store.open_bucket` adds them once: whoever gets a bucket uses
it as it is. A caller that decides itself after each attempt, as heartbeats do, asks for
`without_retries`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from deltawire.errors import RetryError, ThrottledError
from deltawire.store.bucket import Bucket, require_bucket
from deltawire.store.delegating import DelegatingBucket, Verb
from deltawire.store.lanes import current_lane, in_lane, repeated
from deltawire.store.traffic import count

T = TypeVar("T")

RETRIES = 5
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 60.0
THROTTLED_PAUSE_S = 2.0
"""The longest pause before a refused read is sent again. The process's window
(`deltawire.store.request_limit`) sets the pace of all of them."""
WRITER_PAUSE_S = 0.01
WRITER_SHARE = 0.03
EAGER_S = 5.0
LATER_SHARE = 0.1
LONGEST_WRITER_PAUSE_S = 120.0
"""Writes, and reads of a commit, have no such pace. One that has been refused for T seconds waits
about T times the share, between these two pauses: a commit is late by that share. The shorter the
first pauses are, the more of the store's answers a commit gets among readers that outrun it. After
`EAGER_S` the share is `LATER_SHARE`: many writers that outrun a store must not press on."""
THROTTLED_S = 3600.0
"""How long refusals for too many requests are waited out. A version that takes longer to arrive is
superseded."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often an operation is repeated after a `RetryError`, and how long to wait between.

    ``first_pause_s`` (None is `FIRST_PAUSE_S`) doubles after each attempt. Each pause is multiplied
    by a number between 0.5 and 1.5 (``rng`` plus 0.5): ranks that a store refused at one moment
    would otherwise all ask again at one moment. ``sleep`` gets seconds; it may raise an error to
    give up.

    A store that refuses because there are too many requests is there, and the caller's turn comes:
    such refusals do not count as attempts until they have come for ``throttled_s``.

    Example::

        bucket = RetryingBucket(bucket, RetryPolicy(retries=10, first_pause_s=0.5))
    """

    retries: int = RETRIES
    first_pause_s: float | None = None
    sleep: Callable[[float], None] = time.sleep
    rng: Callable[[], float] = random.random
    throttled_s: float = THROTTLED_S
    clock: Callable[[], float] = time.monotonic

    def run(self, operation: Callable[[], T], *, paced: bool = False) -> T:
        """Calls ``operation``, and after a `RetryError` calls it again, at most ``retries``
        times. A ``paced`` one waits for the process's window too.
        """
        attempt = refusals = 0
        began = self.clock()
        while True:
            try:
                with repeated():
                    return operation()
            except ThrottledError:
                refused_s = self.clock() - began
                if refused_s > self.throttled_s:
                    raise
                count("retries")
                if paced:
                    self.sleep(self.pause_s(refusals, THROTTLED_PAUSE_S))
                else:
                    self.sleep(self._writer_pause_s(refused_s))
                refusals += 1
            except RetryError:
                if attempt == self.retries:
                    raise
                count("retries")
                self.sleep(self.pause_s(attempt, LONGEST_PAUSE_S))
                attempt += 1

    def _writer_pause_s(self, refused_s: float) -> float:
        pause_s = writer_pause_s(refused_s, least_s=self.first_pause_s or WRITER_PAUSE_S)
        return min(pause_s * (0.5 + self.rng()), LONGEST_WRITER_PAUSE_S)

    def pause_s(self, attempt: int, longest_s: float) -> float:
        """Returns how long to wait after the attempt of this number, which counts from 0."""
        first_s = FIRST_PAUSE_S if self.first_pause_s is None else self.first_pause_s
        doubled_s = first_s * 2.0 ** min(attempt, 32)
        return min(doubled_s, max(longest_s, first_s)) * (0.5 + self.rng())


def writer_pause_s(refused_s: float, *, least_s: float = WRITER_PAUSE_S) -> float:
    """Returns the mean pause of a write that has been refused for ``refused_s``."""
    share = WRITER_SHARE if refused_s < EAGER_S else LATER_SHARE
    return min(max(least_s, share * refused_s), LONGEST_WRITER_PAUSE_S)


PATIENT = RetryPolicy()
"""The default for most callers: six attempts within about three seconds."""


class RetryingBucket(DelegatingBucket):
    """Repeats every operation of ``inner`` that raises `RetryError`, by ``policy``.

    A repeated `create` may find the object that its own first attempt stored, and then returns
    False: a caller that must know whose object it is reads it back and compares its nonce.
    Wrapping a `RetryingBucket` again replaces its policy instead of multiplying the attempts.

    Example::

        bucket = RetryingBucket(open_bare_bucket("s3://bucket/run"))  # as `open_bucket` does
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

    def with_inner(self, inner: Bucket) -> RetryingBucket:
        """As `DelegatingBucket.with_inner`, with the same policy."""
        return RetryingBucket(inner, self.policy)

    def _call(self, verb: Verb, key: str, operation: Callable[[], T]) -> T:  # noqa: ARG002
        writes = verb in ("put", "create", "delete")
        return self.policy.run(operation, paced=not writes and current_lane() != "first")


class WriterBucket(DelegatingBucket):
    """Passes operations on to ``inner`` so that its reads go before all others of this process
    (see `deltawire.store.lanes`): for commits, which readers wait for.

    Example::

        bucket = WriterBucket.over(open_bucket("s3://bucket/run"))
    """

    @classmethod
    def over(cls, bucket: Bucket) -> Bucket:
        """Returns ``bucket`` in the writers' lane; a local one has no lanes."""
        return bucket if bucket.local or isinstance(bucket, cls) else cls(bucket)

    def with_inner(self, inner: Bucket) -> WriterBucket:
        """As `DelegatingBucket.with_inner`."""
        return WriterBucket(inner)

    def _call(self, verb: Verb, key: str, operation: Callable[[], T]) -> T:  # noqa: ARG002
        with in_lane("first"):
            return operation()


def without_retries(bucket: Bucket) -> Bucket:
    """Returns ``bucket`` with one attempt an operation, still signed: for callers that must not
    wait, such as heartbeats, that must know of each attempt, as deletions do, or that show an
    outage and ask again anyway. All other layers stay.

    Raises `BugError` if a layer above the retries has no `DelegatingBucket.with_inner`.
    """
    return _changed(bucket, lambda _, inner: inner)


def with_retry_policy(bucket: Bucket, policy: Callable[[RetryPolicy], RetryPolicy]) -> Bucket:
    """Returns ``bucket`` with its retries by ``policy(its policy)``; one without retries stays, and
    so does one whose policy is the same afterwards. Raises as `without_retries` does."""

    def change(layer: RetryingBucket, inner: Bucket) -> Bucket:
        new = policy(layer.policy)
        same = inner is layer.inner and new is layer.policy
        return layer if same else RetryingBucket(inner, new)

    return _changed(bucket, change)


def with_one_retry(bucket: Bucket) -> Bucket:
    """Returns ``bucket`` with one repetition at most, and none of requests that are refused."""

    def once(policy: RetryPolicy) -> RetryPolicy:
        # Refusals are not waited out, also by a clock that stands still.
        return replace(policy, retries=min(policy.retries, 1), throttled_s=-1.0)

    return with_retry_policy(bucket, once)


def _changed(bucket: Bucket, change: Callable[[RetryingBucket, Bucket], Bucket]) -> Bucket:
    if not isinstance(bucket, DelegatingBucket):
        require_bucket(bucket)
        return bucket
    inner = _changed(bucket.inner, change)
    if isinstance(bucket, RetryingBucket):
        return change(bucket, inner)
    return bucket if inner is bucket.inner else bucket.with_inner(inner)
