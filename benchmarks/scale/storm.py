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
from deltawire.store.request_limit import MOST, RequestWindow
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


def simulate_storm(  # noqa: PLR0915 - one loop over one state
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
    rng = random.Random(seed)
    policy = RetryPolicy(rng=rng.random)
    rate = readers * blobs / needed_s
    tokens, filled_at, attempts = rate, 0.0, 0
    windows = [RequestWindow() for _ in range(readers)]
    if not adaptive:
        for window in windows:
            window.size = MOST
    under_way = [0] * readers
    left = [blobs] * readers  # not yet begun
    missing = [blobs] * readers
    waiting: list[list[int]] = [[] for _ in range(readers)]  # refused so often, ready again
    order = count()
    # (time, order, kind, reader, attempt, began)
    events: list[tuple[float, int, str, int, int, float]] = []

    def push(at: float, kind: str, reader: int, attempt: int = 0, began: float = 0.0) -> None:
        heapq.heappush(events, (at, next(order), kind, reader, attempt, began))

    def begin(reader: int, now: float) -> None:
        nonlocal tokens, filled_at, attempts
        while (waiting[reader] or left[reader]) and under_way[reader] < REQUESTS:
            opens = windows[reader].opens_at(under_way[reader]) if adaptive else now
            if opens > now:
                if opens != float("inf"):
                    push(opens, "room", reader)
                return
            if waiting[reader]:
                attempt = waiting[reader].pop()
            else:
                attempt, left[reader] = 0, left[reader] - 1
            under_way[reader] += 1
            attempts += 1
            tokens, filled_at = min(tokens + rate * (now - filled_at), rate), now
            taken = tokens >= 1
            tokens -= taken
            after = latency_s * (0.75 + 0.5 * rng.random())
            push(now + after, "answer" if taken else "refusal", reader, attempt, now)

    for reader in range(readers):
        push(rng.random() * 0.1, "room", reader)
    now = 0.0
    while events and any(missing):
        now, _, kind, reader, attempt, began = heapq.heappop(events)
        if now > limit_s:
            now = float("inf")
            break
        if kind == "answer":
            under_way[reader] -= 1
            missing[reader] -= 1
            windows[reader].answered(began, now)
        elif kind == "refusal":
            under_way[reader] -= 1
            windows[reader].refused(began, now)
            push(now + policy.pause_s(attempt, THROTTLED_PAUSE_S), "again", reader, attempt + 1)
        elif kind == "again":
            waiting[reader].append(attempt)
        begin(reader, now)
    return StormFigures(
        readers=readers,
        needed_s=needed_s,
        last_s=now,
        attempts=attempts / (readers * blobs),
    )
