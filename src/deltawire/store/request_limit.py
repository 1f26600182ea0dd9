"""Limits the requests of a process to one store by how the store answers.

A store answers *too many requests* (S3: 503, GCS: 429) above some rate for a prefix. Readers that
go on with as many requests as before, and repeat the refused ones, keep the store above its rate
and get nothing done. So a process has a window: the number of requests that it has under way. It
grows while the store keeps up, by at most one in the time of one answer, and is halved when the
store refuses, once for all requests that were under way then (additive increase, multiplicative
decrease, under which the windows of all readers become alike: Chiu and Jain 1989). Small windows
grow more slowly: by one, they would be refused every other time. Below one request, a window is a
share of the time::

    window 8      eight requests at once
    window 0.25   one request, then a pause of three times its duration

A window below one is needed: sixteen hosts that share a store of ten requests a second have less
than one request each under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

MOST = 64.0
"""Requests under way at most: at 20 ms an answer 3,200 a second, below S3's 5,500 for a prefix."""
FIRST = 8.0
"""The window at first. It doubles in the time of an answer until the store refuses a request."""
LEAST = 1 / 64
"""At 100 ms an answer, one request in 6.4 s."""
GROWTH, EQUAL = 0.05, 0.02
"""A window of w grows by GROWTH + EQUAL / w with an answer, and by at most 1 / w. Tried by
`benchmarks.scale.storm`: growth in proportion to w (0.05 w or 0.1 w) left the windows of some
readers far below the others', so that the last one came 1.2 to 2.3 times too late; more EQUAL costs
refusals."""
SMOOTHING = 0.2
"""The weight of one answer in the mean duration."""


class RequestWindow:
    """How many requests may be under way, by what became of earlier ones. Times are in seconds, by
    the caller's clock.

    Example::

        window = RequestWindow()
        if window.opens_at(under_way=3) <= now:
            ...  # send a request
        window.answered(began, now)
    """

    def __init__(self, most: float = MOST) -> None:
        self.size, self.most = min(FIRST, most), most
        self.refusals = 0
        self._answer_s = 0.0
        self._halved_at = float("-inf")
        self._open_at = float("-inf")

    def opens_at(self, under_way: int) -> float:
        """Returns the time from which on one more request may begin; infinity while too many are
        under way."""
        return self._open_at if under_way < max(self.size, 1.0) else float("inf")

    def answered(self, began: float, now: float) -> None:
        """Notes an answer to a request of ``began``."""
        taken = max(now - began, 0.0)
        self._answer_s += (taken - self._answer_s) * (SMOOTHING if self._answer_s else 1.0)
        growth = min(1 / self.size, GROWTH + EQUAL / self.size) if self.refusals else 1.0
        self.size = min(self.size + growth, self.most)
        self._pause(now)

    def refused(self, began: float, now: float) -> None:
        """Notes that the store refused a request of ``began`` because there are too many."""
        self.refusals += 1
        if began > self._halved_at:  # The others were sent before this was known.
            self.size, self._halved_at = max(self.size / 2, LEAST), now
        self._pause(now)

    def _pause(self, now: float) -> None:
        if self.size < 1:
            self._open_at = max(self._open_at, now + self._answer_s * (1 / self.size - 1))


class RequestLimit:
    """Lets the requests of this process to one store begin when its window has room.

    Example::

        with limit.request(means_throttled):
            ...  # send one request; its error may make the window smaller
    """

    def __init__(
        self,
        window: RequestWindow | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window = window or RequestWindow()
        self._clock = clock
        self._under_way = 0
        self._changed = threading.Condition()

    @contextmanager
    def request(self, means_throttled: Callable[[BaseException], bool]) -> Iterator[None]:
        """Waits for room, and notes how the request ends: refused, if ``means_throttled`` says so
        of its error."""
        with self._changed:
            while (wait_s := self.window.opens_at(self._under_way) - self._clock()) > 0:
                self._changed.wait(min(wait_s, 1.0))
            self._under_way += 1
            began = self._clock()
        refused = False
        try:
            yield
        except BaseException as error:
            refused = means_throttled(error)
            raise
        finally:
            with self._changed:
                self._under_way -= 1
                now = self._clock()
                (self.window.refused if refused else self.window.answered)(began, now)
                self._changed.notify_all()


_LIMITS: dict[str, RequestLimit] = {}
_LOCK = threading.Lock()


def limit_of(url: str) -> RequestLimit:
    """Returns this process's limit for the store and bucket of a URL."""
    parts = urlsplit(url)
    with _LOCK:
        return _LIMITS.setdefault(f"{parts.scheme}://{parts.netloc}", RequestLimit())
