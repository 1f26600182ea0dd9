"""A link, a store's request limit or a host's cores, divided equally among those who use it.

Every use gets the same rate: the capacity over the number of uses, and at most ``each``. Uses then
end in the order of *virtual time*, which advances at that rate; so a thousand uses that begin at
once cost a heap, not a thousand updates each.
"""

from __future__ import annotations

import heapq
import itertools
import math

import simpy


class SharedRate:
    """Divides ``capacity`` units a second; no use gets more than ``each`` units a second.

    Example::

        link = SharedRate(simpy.Environment(), capacity=12.5e9, each=90e6)
        done = link.use(1e9)
    """

    def __init__(self, env: simpy.Environment, capacity: float, each: float = math.inf) -> None:
        self._env = env
        self._capacity = capacity
        self._each = each
        self._uses: list[tuple[float, int, simpy.Event]] = []
        self._numbers = itertools.count()
        self._virtual = 0.0
        self._updated = env.now
        self._wake = 0
        self.used = 0.0
        """Units asked for so far."""

    def use(self, amount: float) -> simpy.Event:
        """Returns an event that happens once ``amount`` units were served."""
        done = self._env.event()
        self.used += amount
        if amount <= 0 or math.isinf(self._rate(len(self._uses) + 1)):
            return done.succeed()
        self._advance()
        heapq.heappush(self._uses, (self._virtual + amount, next(self._numbers), done))
        self._schedule()
        return done

    def _rate(self, uses: int) -> float:
        return min(self._each, self._capacity / uses)

    def _advance(self) -> None:
        if self._uses:
            elapsed = self._env.now - self._updated
            self._virtual += elapsed * self._rate(len(self._uses))
        self._updated = self._env.now

    def _schedule(self) -> None:
        """Sets the timer to the next end; an earlier timer finds that it is not the newest."""
        self._wake += 1
        if self._uses:
            left = max(0.0, self._uses[0][0] - self._virtual)
            timer = self._env.timeout(left / self._rate(len(self._uses)), value=self._wake)
            timer.callbacks.append(self._end)

    def _end(self, timer: simpy.Event) -> None:
        if timer.value != self._wake:
            return
        self._advance()
        first = self._uses[0][0]
        # Those that end together, up to the rounding of the virtual clock.
        while self._uses and self._uses[0][0] <= first * (1 + 1e-12) + 1e-12:
            heapq.heappop(self._uses)[2].succeed()
        self._virtual = max(self._virtual, first)
        self._schedule()
