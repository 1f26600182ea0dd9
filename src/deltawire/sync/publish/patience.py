"""Decides how long a rank waits for other ranks, while their store may throttle all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from deltawire.store.request_limit import refused_ago_s


class Patience:
    """How long a rank waits for others. Time in which the store refused this rank's requests does
    not count: then it refuses the others' too, and they are late, not gone.

    A rank that waits only reads, and stores limit writes separately. So before the time is over it
    writes once, with ``attempt``, and begins again if that was refused: the rank that it waits for
    cannot write either.

    Example::

        patience = Patience(bucket.url, 600.0)
        while not bucket.exists(key) and not patience.over:
            time.sleep(1.0)
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        attempt: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        refused_s: Callable[[str], float] = refused_ago_s,
    ) -> None:
        self._url = url
        self._timeout_s = self._left_s = timeout_s
        self._attempt = attempt
        self._clock, self._refused_s = clock, refused_s
        self._asked_at = clock()

    @property
    def over(self) -> bool:
        """True once the time is over; the interval since the last call counts unless a request was
        refused in it. Raises what ``attempt`` raises."""
        now = self._clock()
        passed_s, self._asked_at = now - self._asked_at, now
        if self._refused_s(self._url) > passed_s:
            self._left_s -= passed_s
        if self._left_s >= 0:
            return False
        self._attempt()
        self._asked_at = self._clock()
        if self._refused_s(self._url) <= self._asked_at - now:
            self._left_s = self._timeout_s
        return self._left_s < 0
