"""Stores for simulated readers: each says whether it answers a request, and after how long."""

from __future__ import annotations

import heapq
import random
from typing import Protocol

JITTER = 0.5
"""A store's own time varies by a quarter in both directions."""


class Store(Protocol):
    """Answers or refuses requests."""

    def ask(self, now: float, size: int, rng: random.Random) -> tuple[bool, float]:
        """Returns whether a request of ``now`` for an object of ``size`` bytes is answered, else
        refused, and after how many seconds."""


def _varied(seconds: float, rng: random.Random) -> float:
    return seconds * (1 - JITTER / 2 + JITTER * rng.random())


class Refusing:
    """Answers ``rate`` requests a second, one second of them at once, and refuses the others. With
    ``by_bytes``, the rate is of bytes."""

    def __init__(self, *, rate: float, latency_s: float, by_bytes: bool = False) -> None:
        self._rate = self._left = rate
        self._latency_s, self._by_bytes = latency_s, by_bytes
        self._filled_at = 0.0

    def ask(self, now: float, size: int, rng: random.Random) -> tuple[bool, float]:
        """As `Store.ask`."""
        self._left = min(self._left + self._rate * (now - self._filled_at), self._rate)
        self._filled_at = now
        needed = size if self._by_bytes else 1
        answered = self._left >= needed
        self._left -= needed * answered
        return answered, _varied(self._latency_s, rng)


class Queueing:
    """Works on ``servers`` requests at once, ``work_s`` each, and lets the others wait, in turn.
    With ``rate``, a request for n bytes takes n / rate seconds longer."""

    def __init__(self, *, servers: int, work_s: float, rate: float = float("inf")) -> None:
        self._free_at = [0.0] * servers
        self._work_s, self._rate = work_s, rate

    def ask(self, now: float, size: int, rng: random.Random) -> tuple[bool, float]:
        """As `Store.ask`."""
        free_at = heapq.heappop(self._free_at)
        ends = max(free_at, now) + _varied(self._work_s, rng) + size / self._rate
        heapq.heappush(self._free_at, ends)
        return True, ends - now


class KeepingUp:
    """Answers any number of requests, each after ``latency_s``, and ``slow_share`` of them after
    ``slowness`` times as long."""

    def __init__(self, *, latency_s: float, slow_share: float = 0.0, slowness: float = 10.0):
        self._latency_s, self._slow_share, self._slowness = latency_s, slow_share, slowness

    def ask(self, now: float, size: int, rng: random.Random) -> tuple[bool, float]:  # noqa: ARG002
        """As `Store.ask`."""
        slow = rng.random() < self._slow_share
        return True, _varied(self._latency_s, rng) * (self._slowness if slow else 1.0)


class MeasuredStore:
    """Counts what another store gets."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.attempts = 0
        self._spans: list[tuple[float, float]] = []

    def ask(self, now: float, size: int, rng: random.Random) -> tuple[bool, float]:
        """As `Store.ask`."""
        self.attempts += 1
        answered, taken_s = self._store.ask(now, size, rng)
        self._spans.append((now, now + taken_s))
        return answered, taken_s

    def under_way(self, after: float) -> float:
        """Returns the mean number of requests at once, in the time from the share ``after`` on."""
        end = max(last for _, last in self._spans)
        start = after * end
        inside = sum(max(last - max(first, start), 0.0) for first, last in self._spans)
        return inside / (end - start)
