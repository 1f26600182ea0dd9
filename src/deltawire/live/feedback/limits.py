"""Limits of feedback: how often one user may report, and how often about one answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

DAY_S = 86_400.0
MAX_USERS = 100_000
MAX_ANSWERS = 100_000


@dataclass(frozen=True)
class FeedbackLimits:
    """``per_minute`` reports of one user, in bursts of as many; ``per_day`` in all; and
    ``per_answer`` about one answer, whoever sends them."""

    per_minute: int = 60
    per_day: int = 1000
    per_answer: int = 16


class FeedbackRefusal(NamedTuple):
    """The reason of a refusal, and the seconds after which it may be over."""

    reason: str
    after_s: float


@dataclass
class _Allowance:
    tokens: float
    at: float
    day_began: float
    today: int = 0


class FeedbackLimiter:
    """Counts the reports of the users and answers seen last; bounded in memory."""

    def __init__(self, limits: FeedbackLimits, clock: Callable[[], float] = monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._users: OrderedDict[str, _Allowance] = OrderedDict()
        self._answers: OrderedDict[str, int] = OrderedDict()

    def take(self, user: str, answer: str) -> FeedbackRefusal | None:
        """Counts a report; returns why it is refused, None if it is not."""
        now, limits = self._clock(), self._limits
        rate = limits.per_minute / 60
        found = self._users.pop(user, None) or _Allowance(limits.per_minute, now, now)
        self._users[user] = found
        if len(self._users) > MAX_USERS:
            self._users.popitem(last=False)
        found.tokens = min(limits.per_minute, found.tokens + (now - found.at) * rate)
        found.at = now
        if now - found.day_began >= DAY_S:
            found.day_began, found.today = now, 0
        if found.today >= limits.per_day:
            return FeedbackRefusal(
                "too much feedback of this user today", found.day_began + DAY_S - now
            )
        if found.tokens < 1:
            return FeedbackRefusal("too much feedback of this user", (1 - found.tokens) / rate)
        about = self._answers.pop(answer, 0)
        self._answers[answer] = about
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        if about >= limits.per_answer:
            return FeedbackRefusal("too much feedback about this answer", DAY_S)
        self._answers[answer] = about + 1
        found.tokens -= 1
        found.today += 1
        return None
