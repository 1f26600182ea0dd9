"""Choosing: which answers a group is made of.

The answers that matured last come first, whenever they were served. A user who reports late is
chosen as often as one who reports at once, and what is trained on is fresh when more answers mature
than the trainer takes. Users take turns: a name that asks and reports more often than others is not
heard more often. The name is the one that a back end sends with its API key. Nothing else that a
client chooses counts: no label, no length, no time.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

FRESH = 4
"""Users take turns within the newest answers, so many groups of them."""

TURN_GROUPS = 32
"""A user's answers are limited over so many groups."""


class Choosable(Protocol):
    """The facts about an answer that the choice uses."""

    @property
    def user(self) -> str:
        """The user's pseudonym; answers without one are those of one user."""
        ...

    @property
    def matured_at(self) -> float:
        """When it could be trained on first, in seconds since 1970."""
        ...

    @property
    def served_at(self) -> float:
        """When it was served, in seconds since 1970."""
        ...


A = TypeVar("A", bound=Choosable)


class Turns:
    """How many answers of each user were in the last `TURN_GROUPS` groups.

    A user may have ``ratio`` times as many there as the median of the users who have any, and at
    least one more than the median, so that nobody is heard much more often by asking more often. A
    ``ratio`` of 0 sets no limit.

    Example::

        turns = Turns(ratio=2.0)
        turns.add(["ann", "bob", "bob"], at=0.0)
        turns.left("bob")
    """

    def __init__(self, *, ratio: float) -> None:
        self.trained_at: dict[str, float] = {}
        """When each user last took a turn."""
        self._ratio = ratio
        self._groups: deque[Sequence[str]] = deque(maxlen=TURN_GROUPS)
        self._had: Counter[str] | None = None
        self._most = 0.0

    def add(self, users: Sequence[str], *, at: float) -> None:
        """Adds a group by the user of each answer."""
        self._groups.append(users)
        self._had = None
        self.skip(users, at=at)

    def skip(self, users: Iterable[str], *, at: float) -> None:
        """Lets other users come first, though there is no group of these."""
        for user in users:
            self.trained_at[user] = max(at, self.trained_at.get(user, at))

    def left(self, user: str) -> float:
        """Returns how many answers of a user the next group may take."""
        if not self._ratio or not self._groups:
            return math.inf
        if self._had is None:
            self._had = Counter(user for group in self._groups for user in group)
            median = statistics.median(self._had.values())
            self._most = max(self._ratio * median, median + 1)
        return max(0, math.floor(self._most) - self._had[user])


def choose(answers: Sequence[A], count: int, *, most: int, turns: Turns) -> list[A]:
    """Chooses up to ``count`` answers, at most ``most`` of each user.

    Within the newest `FRESH` · ``count`` answers, and then within the others, each user has one
    before any has a second one, the user first who was trained on longest ago. With ``most`` =
    ``count`` there is no limit, and users take no turns.
    """
    newest = sorted(answers, key=lambda one: (-one.matured_at, -one.served_at))
    if most >= count:
        return newest[:count]
    split = FRESH * count
    pools = [_by_user(pool, turns.trained_at) for pool in (newest[:split], newest[split:])]
    chosen: list[A] = []
    taken: Counter[str] = Counter()
    for turn in range(1, most + 1):
        for pool in pools:
            for user, left in pool.items():
                if len(chosen) == count:
                    return chosen
                if left and taken[user] < min(turn, turns.left(user)):
                    taken[user] += 1
                    chosen.append(left.pop(0))
    return chosen


def _by_user(answers: Sequence[A], trained_at: Mapping[str, float]) -> dict[str, list[A]]:
    """Returns the answers of each user in order, the user first who was trained on longest ago."""
    found: dict[str, list[A]] = {}
    for one in answers:
        found.setdefault(one.user, []).append(one)
    order = sorted(found, key=lambda user: trained_at.get(user, -math.inf))
    return {user: found[user] for user in order}
