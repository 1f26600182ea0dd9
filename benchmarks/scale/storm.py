"""Simulates readers that need more requests than their store answers in the time.

Discrete events and no waiting: every reader has the window and the pauses of
`deltawire.store.request_limit` and `deltawire.store.retrying`, the code that real readers run. The
store answers ``rate`` requests a second, one second of them at once, and refuses the others::

    reader 0 ─┬─ thread 0: request ─▶ store ─▶ answer after latency, next blob
              ├─ thread 1: request ─▶ store ─▶ 503 after latency, pause, the same blob again
              └─ …
"""

from __future__ import annotations

import heapq
import random
from itertools import count

import msgspec

from deltawire.store.parallel import REQUESTS
from deltawire.store.request_limit import RequestWindow
from deltawire.store.retrying import THROTTLED_PAUSE_S, RetryPolicy


class StormFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One storm: ``needed_s`` is all requests divided by the store's rate. ``last_s`` is when the
    last reader has everything, ``attempts`` how many requests were made for each needed one."""

    readers: int
    needed_s: float
    last_s: float
    attempts: float

    @property
    def last_vs_needed(self) -> float:
        """How much later the last reader is than a perfect queue would make it."""
        return self.last_s / self.needed_s


def simulate_storm(
    *,
    needed_s: float,
    readers: int = 16,
    blobs: int = 600,
    latency_s: float = 0.1,
    adaptive: bool = True,
    limit_s: float = 3600.0,
    seed: int = 0,
) -> StormFigures:
    """Has ``readers`` fetch ``blobs`` each, from a store that could answer all in ``needed_s``.

    Without ``adaptive`` each reader has `REQUESTS` under way whatever the store says, but pauses
    and never gives up. Ends after ``limit_s`` at the latest, with infinity as ``last_s``.
    """
    storm = _Storm(
        readers=readers,
        blobs=blobs,
        rate=readers * blobs / needed_s,
        latency_s=latency_s,
        adaptive=adaptive,
        rng=random.Random(seed),
    )
    return StormFigures(
        readers=readers,
        needed_s=needed_s,
        last_s=storm.run(limit_s),
        attempts=storm.attempts / (readers * blobs),
    )


class _Reader:
    """One process: its window, and what it has still to fetch."""

    def __init__(self, blobs: int) -> None:
        self.window = RequestWindow()
        self.under_way = 0
        self.unasked = self.missing = blobs
        self.refused: list[int] = []
        """Blobs that may be asked for again: how often each was refused."""


class _Storm:
    """The readers, the store's tokens, and the events to come: when, an order for equal times,
    what, whose, how often the blob was refused, and when the request began."""

    def __init__(
        self,
        *,
        readers: int,
        blobs: int,
        rate: float,
        latency_s: float,
        adaptive: bool,
        rng: random.Random,
    ) -> None:
        self.attempts = 0
        self._readers = [_Reader(blobs) for _ in range(readers)]
        self._rate = self._tokens = rate
        self._filled_at = 0.0
        self._latency_s, self._adaptive, self._rng = latency_s, adaptive, rng
        self._policy = RetryPolicy(rng=rng.random)
        self._order = count()
        self._events: list[tuple[float, int, str, int, int, float]] = []

    def run(self, limit_s: float) -> float:
        """Returns when the last reader has everything; infinity after ``limit_s``."""
        for number in range(len(self._readers)):
            self._push(self._rng.random() * 0.1, "room", number)
        now = 0.0
        while any(reader.missing for reader in self._readers):
            now, _, kind, number, refusals, began = heapq.heappop(self._events)
            if now > limit_s:
                return float("inf")
            self._handle(now, kind, number, refusals, began)
            self._begin(number, now)
        return now

    def _push(
        self, at: float, kind: str, number: int, refusals: int = 0, began: float = 0.0
    ) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, number, refusals, began))

    def _handle(self, now: float, kind: str, number: int, refusals: int, began: float) -> None:
        reader = self._readers[number]
        if kind == "answer":
            reader.under_way -= 1
            reader.missing -= 1
            reader.window.answered(began, now)
        elif kind == "refusal":
            reader.under_way -= 1
            reader.window.refused(began, now)
            pause_s = self._policy.pause_s(refusals, THROTTLED_PAUSE_S)
            self._push(now + pause_s, "again", number, refusals + 1)
        elif kind == "again":
            reader.refused.append(refusals)

    def _begin(self, number: int, now: float) -> None:
        """Sends the requests of a reader that its window has room for."""
        reader = self._readers[number]
        while (reader.refused or reader.unasked) and reader.under_way < REQUESTS:
            opens_at = reader.window.opens_at(reader.under_way) if self._adaptive else now
            if opens_at > now:
                if opens_at != float("inf"):
                    self._push(opens_at, "room", number)
                return
            if reader.refused:
                refusals = reader.refused.pop()
            else:
                refusals, reader.unasked = 0, reader.unasked - 1
            reader.window.sent(reader.under_way, now)
            reader.under_way += 1
            kind = "answer" if self._take(now) else "refusal"
            taken_s = self._latency_s * (0.75 + 0.5 * self._rng.random())
            self._push(now + taken_s, kind, number, refusals, now)

    def _take(self, now: float) -> bool:
        """Returns whether the store answers a request."""
        self.attempts += 1
        gained = self._rate * (now - self._filled_at)
        self._tokens, self._filled_at = min(self._tokens + gained, self._rate), now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
