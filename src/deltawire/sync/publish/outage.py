"""Decides how long a publisher goes on while its store does not answer, and reports it.

Concurrency::

    commit thread                              publishing thread
      attempt ─▶ RetryError ─▶ pause, warn       supersede: ends the pause, waits for the attempt
      ▲             (1 to 30 s)      │           to end, copies newer weights over the staged ones
      └──────────────────────────────┘
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltawire.errors import RetryError
from deltawire.store import Bucket, RetryPolicy, with_retry_policy

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""The pause between two attempts at a version begins at the first and doubles up to the second."""

WARN_EVERY_S = 60.0


class Outage:
    """The time without the store of the run at ``url``, of which ``max_outage`` seconds are
    tolerated; None is no limit.

    ``clock`` gives seconds. ``superseded`` counts the versions that were never committed because a
    newer one took their place.

    Example::

        outage = Outage("s3://bucket/run", 600.0)
        while not committed():
            outage.pause(error, version=7)
        outage.end()
    """

    def __init__(
        self,
        url: str,
        max_outage: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_outage = max_outage
        self.superseded = 0
        self.clock = clock
        self._url = url
        self._began: float | None = None
        self._warned: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._superseding = False
        self._given_up = False
        self._wake = threading.Event()

    @property
    def seconds(self) -> float:
        """How long the store has not answered, 0 while it does."""
        began = self._began
        return 0.0 if began is None else self.clock() - began

    @property
    def exceeded(self) -> bool:
        """True if waiting any longer makes no sense."""
        limit = self.max_outage
        return self._given_up or (limit is not None and self.seconds >= limit)

    def pause(self, error: RetryError, version: int) -> None:
        """Waits before the next attempt at ``version``, after one that ended with ``error``.

        Raises ``error`` if newer weights wait for this version's place, or the limit is exceeded.
        """
        if self._began is None:
            self._began = self.clock()
        self._check(error, version)
        if self._warned is None or self.clock() - self._warned >= WARN_EVERY_S:
            self._warned = self.clock()
            logger.warning(
                "version %d is not committed yet, the store has not answered for %.0f s "
                "(%d versions superseded meanwhile); trying again: %s",
                version,
                self.seconds,
                self.superseded,
                error,
            )
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        if self.max_outage is not None:
            pause_s = min(pause_s, max(self.max_outage - self.seconds, 0.0))
        self.wait(pause_s)
        self._check(error, version)

    def _check(self, error: RetryError, version: int) -> None:
        if self._superseding or self._given_up or self.max_outage == 0:
            raise error
        if self.exceeded:
            raise RetryError(
                f"the store has not answered for {self.seconds:.0f} s, and max_outage is "
                f"{self.max_outage:.0f}: {error.message}",
                hint="publish again once it answers; the weights that are then given are stored",
                run=self._url,
                version=version,
                key=error.key,
            ) from error

    def wait(self, seconds: float) -> None:
        """Sleeps, or returns at once if newer weights wait or the version is given up."""
        self._wake.wait(seconds)

    def sleep(self, seconds: float) -> None:
        """Sleeps between two requests of one attempt; a `RetryPolicy` takes this.

        While the store is away and newer weights wait, raises the error that is being handled.
        """
        self.wait(seconds)
        error = sys.exception()  # A policy sleeps while it handles a request's error.
        if self._wake.is_set() and error is not None:
            raise error

    def end(self) -> None:
        """The store has answered: the next failure begins a new outage."""
        if self._warned is not None:
            logger.warning("the store of %s answers again, after %.0f s", self._url, self.seconds)
        self._began = self._warned = None
        self._pause_s = FIRST_PAUSE_S

    @contextmanager
    def superseding(self) -> Iterator[None]:
        """Within this context a version whose store is away is given up at once."""
        self._superseding = True
        if self._began is not None:
            self._wake.set()
        try:
            yield
        finally:
            self._superseding = False
            if not self._given_up:
                self._wake.clear()

    def give_up(self) -> None:
        """Ends all waiting, for good."""
        self._given_up = True
        self._wake.set()

    def extend(self, least_s: float) -> None:
        """Tolerates at least ``least_s`` seconds from now on, as at the end of the program."""
        if self.max_outage is not None:
            self.max_outage = max(self.max_outage, self.seconds + least_s)

    def over(self, bucket: Bucket) -> Bucket:
        """Returns ``bucket`` with retries that this outage can interrupt; a caller's own pauses
        between retries are kept. A store that refuses because there are too many requests is there,
        so refusals are waited out for as long as they come."""
        return with_retry_policy(bucket, self._interruptible)

    def _interruptible(self, policy: RetryPolicy) -> RetryPolicy:
        if policy.sleep is not time.sleep:
            return policy
        return RetryPolicy(
            policy.retries, policy.first_pause_s, self.sleep, policy.rng, throttled_s=float("inf")
        )
