"""Simulates readers that need more requests than their store answers in the time.

Discrete events and no waiting: every reader has the window and the pauses of
`deltawire.store.request_limit` and `deltawire.store.retrying`, the code that real readers run. The
stores are those of `benchmarks.scale.storm_stores`, for example one that answers so many requests
a second and refuses the others::

    reader 0 ─┬─ thread 0: request ─▶ store ─▶ answer after latency, next blob
              ├─ thread 1: request ─▶ store ─▶ 503 after latency, pause, the same blob again
              └─ …
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec

from benchmarks.scale.storm_stores import MeasuredStore, Refusing, Store
from deltawire.store.parallel import REQUESTS
from deltawire.store.request_limit import RequestWindow
from deltawire.store.retrying import THROTTLED_PAUSE_S, RetryPolicy


class StormFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One storm: ``needed_s`` is what the store needs for all requests in a perfect queue.
    ``last_s`` is when the last reader has everything, ``attempts`` how many requests were made for
    each needed one, and ``under_way`` the mean number of requests that the store had at once in the
    second half of the time."""

    readers: int
    needed_s: float
    last_s: float
    attempts: float
    under_way: float = 0.0

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
    store = Refusing(rate=readers * blobs / needed_s, latency_s=latency_s)
    return simulate_store(
        store,
        needed_s=needed_s,
        readers=readers,
        sizes=[0] * blobs,
        adaptive=adaptive,
        limit_s=limit_s,
        seed=seed,
    )


def simulate_store(
    store: Store,
    *,
    needed_s: float,
    readers: int,
    sizes: Sequence[int],
    adaptive: bool = True,
    limit_s: float = 3600.0,
    seed: int = 0,
) -> StormFigures:
    """Has ``readers`` fetch objects of ``sizes`` bytes each from a store; see `simulate_storm`."""
    measured = MeasuredStore(store)
    storm = _Storm(measured, readers, sizes, adaptive=adaptive, rng=random.Random(seed))
    last_s = storm.run(limit_s)
    return StormFigures(
        readers=readers,
        needed_s=needed_s,
        last_s=last_s,
        attempts=measured.attempts / (readers * len(sizes)),
        under_way=measured.under_way(0.5),
    )


class _Reader:
    """One process: its window, and the objects that it has still to fetch, by their bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.window = RequestWindow()
        self.under_way = 0
        self.missing = len(sizes)
        self.unasked = list(reversed(sizes))
        self.refused: list[tuple[int, int]] = []
        """Objects that may be asked for again: how often each was refused, and its bytes."""


class _Event(NamedTuple):
    """An event: its time, an order for equal times, its kind, the reader, how often the object was
    refused, its bytes, and when the request began."""

    at: float
    order: int
    kind: str
    number: int
    refusals: int = 0
    size: int = 0
    began: float = 0.0


class _Storm:
    """The readers, and the events to come."""

    def __init__(
        self,
        store: MeasuredStore,
        readers: int,
        sizes: Sequence[int],
        *,
        adaptive: bool,
        rng: random.Random,
    ) -> None:
        self._readers = [_Reader(sizes) for _ in range(readers)]
        self._store, self._adaptive, self._rng = store, adaptive, rng
        self._policy = RetryPolicy(rng=rng.random)
        self._order = count()
        self._events: list[_Event] = []

    def run(self, limit_s: float) -> float:
        """Returns when the last reader has everything; infinity after ``limit_s``."""
        for number in range(len(self._readers)):
            self._push(self._rng.random() * 0.1, "room", number)
        now = 0.0
        while any(reader.missing for reader in self._readers):
            event = heapq.heappop(self._events)
            now = event.at
            if now > limit_s:
                return float("inf")
            self._handle(event)
            self._begin(event.number, now)
        return now

    def _push(self, at: float, kind: str, number: int, *more: Any) -> None:
        heapq.heappush(self._events, _Event(at, next(self._order), kind, number, *more))

    def _handle(self, event: _Event) -> None:
        reader = self._readers[event.number]
        if event.kind == "answer":
            reader.under_way -= 1
            reader.missing -= 1
            reader.window.answered(event.began, event.at, event.size)
        elif event.kind == "refusal":
            reader.under_way -= 1
            reader.window.refused(event.began, event.at)
            pause_s = self._policy.pause_s(event.refusals, THROTTLED_PAUSE_S)
            self._push(event.at + pause_s, "again", event.number, event.refusals + 1, event.size)
        elif event.kind == "again":
            reader.refused.append((event.refusals, event.size))

    def _begin(self, number: int, now: float) -> None:
        """Sends the requests of a reader that its window has room for."""
        reader = self._readers[number]
        while (reader.refused or reader.unasked) and reader.under_way < REQUESTS:
            opens_at = reader.window.opens_at(reader.under_way) if self._adaptive else now
            if opens_at > now:
                if opens_at != float("inf"):
                    self._push(opens_at, "room", number)
                return
            refusals, size = reader.refused.pop() if reader.refused else (0, reader.unasked.pop())
            reader.window.sent(reader.under_way, now)
            reader.under_way += 1
            answered, taken_s = self._store.ask(now, size, self._rng)
            kind = "answer" if answered else "refusal"
            self._push(now + taken_s, kind, number, refusals, size, now)
