"""Quota: bounds the share of a step that one worker makes.

Of the P groups of a step at most c = ⌈P · max(q, 1/n)⌉ are one worker's, where q is
``workers.quota`` and n counts the workers that deliver: those with a group that waits, those whose
last group arrived less than `DELIVERS_S` ago, and those that joined less than that ago. With fewer
than 1/q such workers no step could be made under q, so the quota gives way to equal shares; a run
of one worker has no quota.

The bound is hard, so with a quota below 1 a step may wait for other workers' groups. A worker that
stops delivering is no longer counted after `DELIVERS_S`. A slow worker can slow a run down if fewer
than 1/q others remain, so run more workers than that.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from deltawire.rl.control.staleness import Choice

DELIVERS_S = 120.0


class _Made(Protocol):
    @property
    def worker(self) -> str: ...

    @property
    def oldest(self) -> int: ...

    @property
    def place(self) -> int: ...


G = TypeVar("G", bound=_Made)


class Quota:
    """The largest share of a step for each worker; a share of 1 is no limit.

    Example::

        quota = Quota(0.5)
        quota.delivered("w0")
        quota.largest(groups_per_step=16, waiting=["w0", "w1"])   # 8
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = share
        self._clock = clock
        self._delivered_at: dict[str, float] = {}

    def expect(self, workers: Collection[str]) -> None:
        """Notes which workers are alive: each may be about to deliver when it is first seen."""
        now = self._clock()
        for worker in workers:
            self._delivered_at.setdefault(worker, now)

    def delivered(self, worker: str) -> None:
        """Notes that a group of a worker arrived."""
        self._delivered_at[worker] = self._clock()

    def forget(self, worker: str) -> None:
        """Stops counting a worker."""
        self._delivered_at.pop(worker, None)

    def largest(self, *, groups_per_step: int, waiting: Sequence[str]) -> int:
        """The largest number of groups of one worker in the next step; ``waiting`` names workers
        with groups."""
        now = self._clock()
        recent = {w for w, at in self._delivered_at.items() if now - at < DELIVERS_S}
        count = max(1, len(recent | set(waiting)))
        return math.ceil(groups_per_step * max(self.share, 1 / count))

    def choose(
        self,
        choose: Callable[[list[G]], Choice[G]],
        waiting: Sequence[G],
        *,
        groups_per_step: int,
    ) -> Choice[G]:
        """Applies ``choose`` to the groups within the quota: the first ones of each worker in its
        order, at most its share of the step.

        Groups beyond the quota stay in the buffer. Those that are too old are evicted at once,
        however many of them a worker has: they would hold its credits, and hide its fresh groups.
        """
        if self.share >= 1:
            return choose(list(waiting))
        left = list(waiting)
        evicted: dict[int, G] = {}
        while True:
            choice = self._choose_within(choose, left, groups_per_step=groups_per_step)
            known = len(evicted)
            evicted |= {id(one): one for one in choice.evicted}
            left = [one for one in left if id(one) not in evicted]
            if len(evicted) == known:
                return Choice(choice.taken, list(evicted.values()), choice.requeued)

    def _choose_within(
        self,
        choose: Callable[[list[G]], Choice[G]],
        waiting: Sequence[G],
        *,
        groups_per_step: int,
    ) -> Choice[G]:
        largest = self.largest(
            groups_per_step=groups_per_step, waiting=[one.worker for one in waiting]
        )
        shown: dict[str, int] = {}
        while True:
            seen: Counter[str] = Counter()
            passing = []
            for one in sorted(waiting, key=lambda one: (one.place, one.oldest)):
                seen[one.worker] += 1
                if seen[one.worker] <= shown.get(one.worker, largest):
                    passing.append(one)
            choice = choose(passing)
            taken = Counter(one.worker for one in choice.taken)
            over = {w: n - largest for w, n in taken.items() if n > largest}
            if not over:
                return choice
            # Requeued groups of a worker count too, and are not shown by this loop.
            for worker, excess in over.items():
                before = shown.get(worker, largest)
                if not before:
                    return Choice(evicted=choice.evicted, requeued=choice.requeued)
                shown[worker] = max(0, before - excess)
