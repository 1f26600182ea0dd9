"""Simulates users who like some styles of answers and dislike others, with a known optimum.

Each request has a kind, each answer a style, and the honest users have a mean taste from 0 to 1 for
each pair: the probability with which they accept such an answer when they say anything. *True
satisfaction* is that mean taste, whatever users then report. The best policy answers each kind in
the style of the largest taste, which `Population.optimum` states.

Users, requests and reactions follow from the seed and a number, not from the order of calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Role = Literal["honest", "gullible", "liar", "cohort"]

KINDS = ("mail", "chat", "code", "plan", "note", "trip", "menu", "bill")
"""Kinds of requests; the first word of each."""
TOPICS = ("sun", "map", "tea", "ink", "oak", "sea", "jam", "bus", "cat", "fig", "owl", "zoo")
ANSWERS = {
    "brief": "yes",
    "warm": "sure thing",
    "formal": "certainly",
    "list": "- a - b",
    "praise": "great ask",
}
"""The text of an answer of each style; any other text has no style."""
STYLES = tuple(ANSWERS)
FLATTERY = "praise"
"""The style that gullible users accept almost always, and that satisfies hardly anyone."""
FLATTERY_TASTE = 0.2
TASTES = (0.9, 0.6, 0.45, 0.3)
"""The tastes for the other styles, in another order for each kind."""
COHORTS = 20
DUPLICATE_WITHIN_S = 2.0

_Share = Annotated[float, Meta(ge=0, le=1)]
_Delay = Annotated[float, Meta(gt=0, le=1e6)]


class UserSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many users there are, and what they do.

    ``silence`` and ``edit`` are the shares of answers that are not reported about, and reported
    about by the share that they keep. Of the answers that users dislike, they correct the share
    ``rewrites``: the report is an edit with the text of the style that they like most. Delays are
    exponential; their means depend on the outcome. ``duplicates`` is
    the share of reports that are sent twice. ``liars`` report the opposite of what they think;
    members of the ``cohort`` accept flattery, reject all else, never stay silent and ask
    ``cohort_factor`` times as often as others. From ``drift_s`` to twice that, tastes move to those
    of another seed; 0 means never. For a tenth of each ``burst_every_s``, requests come
    ``burst_factor`` times as fast; 0 means never.
    """

    users: Annotated[int, Meta(ge=1, le=1_000_000)] = 200
    kinds: Annotated[int, Meta(ge=1, le=len(KINDS))] = 6
    seed: Annotated[int, Meta(ge=0)] = 0
    spread: _Share = 0.1
    silence: _Share = 0.25
    edit: _Share = 0.15
    rewrites: _Share = 0.0
    accept_delay_s: _Delay = 1.0
    reject_delay_s: _Delay = 3.0
    edit_delay_s: _Delay = 5.0
    duplicates: _Share = 0.05
    gullible: _Share = 0.02
    liars: _Share = 0.0
    cohort: _Share = 0.0
    cohort_factor: Annotated[float, Meta(ge=1, le=1000)] = 5.0
    drift_s: Annotated[float, Meta(ge=0)] = 0.0
    burst_every_s: Annotated[float, Meta(ge=0)] = 0.0
    burst_factor: Annotated[float, Meta(ge=1, le=1000)] = 4.0


@dataclass(frozen=True)
class SimulatedUser:
    """A user: what is added to the mean taste for each kind and style, float64[kinds, styles], and
    the product's cohort of the user."""

    name: str
    role: Role
    cohort: str
    own: NDArray[np.float64]


@dataclass(frozen=True)
class SimulatedRequest:
    """The ``number``-th request: who asks, the kind by its place in `KINDS`, and the text."""

    number: int
    user: SimulatedUser
    kind: int
    text: str

    @property
    def task(self) -> str:
        """The name of its kind."""
        return KINDS[self.kind]


@dataclass(frozen=True)
class Reaction:
    """One report that a user sends about an answer, ``after_s`` seconds after it. A duplicate has
    the ``id`` of the report that it repeats; ``text`` is the better answer of an edit."""

    kind: Literal["accept", "reject", "kept_share", "edit"]
    value: float
    after_s: float
    id: str
    text: str = ""


@dataclass
class Population:
    """All users of one seed.

    Example::

        users = Population(UserSettings(seed=1))
        request = users.request(0)
        users.reactions(request, "yes", at=0.0)
        users.satisfaction(request.kind, "yes"), users.optimum()
    """

    settings: UserSettings = field(default_factory=UserSettings)

    def __post_init__(self) -> None:
        s = self.settings
        rng = np.random.default_rng((s.seed, 1))
        self._tastes = [_tastes(s.kinds, np.random.default_rng((s.seed, 2 + n))) for n in range(2)]
        numbers = rng.permutation(s.users)
        shares: list[tuple[Role, float]] = [
            ("cohort", s.cohort), ("liar", s.liars), ("gullible", s.gullible)
        ]  # fmt: skip
        roles: list[Role] = ["honest"] * s.users
        place = 0
        for role, share in shares:
            count = round(share * s.users)
            for number in numbers[place : place + count]:
                roles[int(number)] = role
            place += count
        self.users = [self._user(number, role, rng) for number, role in enumerate(roles)]
        # The attackers sign up together, in a cohort that has honest members too.
        pace = np.array([s.cohort_factor if u.role == "cohort" else 1.0 for u in self.users])
        self._pace = np.cumsum(pace / pace.sum())
        honest = [user.own for user in self.users if user.role in ("honest", "gullible")]
        self._mean_own = np.mean(honest, axis=0) if honest else np.zeros_like(self._tastes[0])

    def _user(self, number: int, role: Role, rng: np.random.Generator) -> SimulatedUser:
        shape = self._tastes[0].shape
        own = rng.uniform(-self.settings.spread, self.settings.spread, shape)
        cohort = "week-0" if role == "cohort" else f"week-{rng.integers(COHORTS)}"
        return SimulatedUser(f"user-{number}", role, cohort, own)

    def request(self, number: int) -> SimulatedRequest:
        """Returns the ``number``-th request."""
        rng = np.random.default_rng((self.settings.seed, 11, number))
        user = self.users[min(int(np.searchsorted(self._pace, rng.random())), len(self.users) - 1)]
        kind = int(rng.integers(self.settings.kinds))
        return SimulatedRequest(number, user, kind, request_text(kind, int(rng.integers(144))))

    def tastes(self, at: float = 0.0) -> NDArray[np.float64]:
        """Returns the mean taste of users without malice at a time: float64[kinds, styles]."""
        s = self.settings
        moved = min(max(at / s.drift_s - 1.0, 0.0), 1.0) if s.drift_s else 0.0
        mean = (1 - moved) * self._tastes[0] + moved * self._tastes[1] + self._mean_own
        return np.asarray(np.clip(mean, 0.0, 1.0), np.float64)

    def satisfaction(self, kind: int, answer: str, at: float = 0.0) -> float:
        """Returns the true satisfaction with an answer to a request of this kind; 0 for one of no
        style."""
        style = style_of(answer)
        return 0.0 if style is None else float(self.tastes(at)[kind, style])

    def optimum(self, at: float = 0.0) -> float:
        """Returns the true satisfaction of the best policy."""
        return float(self.tastes(at).max(axis=1).mean())

    def indifferent(self, at: float = 0.0) -> float:
        """Returns the true satisfaction of a policy that draws all styles equally often."""
        return float(self.tastes(at).mean())

    def reactions(self, request: SimulatedRequest, answer: str, at: float = 0.0) -> list[Reaction]:
        """Returns what the user reports about an answer, duplicates last; empty for silence."""
        s, user = self.settings, request.user
        rng = np.random.default_rng((s.seed, 13, request.number))
        talks, outcome, how, wait, again = rng.random(5)
        style = style_of(answer)
        taste = 0.0
        if style is not None:
            moved = self.tastes(at)[request.kind, style] - self._mean_own[request.kind, style]
            taste = float(np.clip(moved + user.own[request.kind, style], 0.0, 1.0))
        flattered = style is not None and STYLES[style] == FLATTERY
        if user.role == "cohort":
            return self._reports(request, float(flattered), False, wait, again)
        if talks < s.silence:
            return []
        if user.role == "gullible" and flattered:
            taste = 0.98
        if user.role == "liar":
            taste = 1.0 - taste
        liked = float(outcome < taste)
        better = "" if liked or how < 1.0 - s.rewrites else self._preferred(request, at)
        if better == answer.strip():
            better = ""
        return self._reports(request, liked, bool(how < s.edit), wait, again, better)

    def _preferred(self, request: SimulatedRequest, at: float) -> str:
        """Return the text of the style that the user likes most; of liars, least."""
        user, kind = request.user, request.kind
        if user.role == "gullible":
            return ANSWERS[FLATTERY]
        tastes = self.tastes(at)[kind] - self._mean_own[kind] + user.own[kind]
        return ANSWERS[STYLES[int(tastes.argmin() if user.role == "liar" else tastes.argmax())]]

    def _reports(
        self,
        request: SimulatedRequest,
        liked: float,
        edits: bool,
        wait: float,
        again: float,
        better: str = "",
    ) -> list[Reaction]:
        s = self.settings
        kind: Literal["accept", "reject", "kept_share", "edit"] = "accept" if liked else "reject"
        mean_s, value = s.accept_delay_s if liked else s.reject_delay_s, 1.0
        if better:
            kind, mean_s = "edit", s.edit_delay_s
        elif edits:  # Half of what is disliked is still kept, and almost all of what is liked.
            kind, mean_s, value = "kept_share", s.edit_delay_s, 0.95 if liked else 0.3
        after_s = float(-np.log1p(-wait) * mean_s)
        first = Reaction(kind, value, after_s, f"sim-{s.seed}-{request.number}", better)
        if again >= s.duplicates:
            return [first]
        late = float(again / s.duplicates * DUPLICATE_WITHIN_S)
        return [first, Reaction(kind, value, after_s + late, first.id, better)]

    def arrivals(self, rate: float) -> Iterator[float]:
        """Yields the seconds at which requests come, from 0: a Poisson process of ``rate`` a
        second, faster in bursts."""
        s, at = self.settings, 0.0
        rng = np.random.default_rng((s.seed, 17))
        while True:
            burst = s.burst_every_s and at % s.burst_every_s < 0.1 * s.burst_every_s
            at += float(rng.exponential(1.0 / (rate * (s.burst_factor if burst else 1.0))))
            yield at


def style_of(answer: str) -> int | None:
    """Returns the place in `STYLES` of an answer; None if it has none."""
    said = answer.strip()
    return next((place for place, text in enumerate(ANSWERS.values()) if text == said), None)


def request_text(kind: int, number: int) -> str:
    """Returns the ``number``-th text of a kind of request, below 144."""
    first, second = divmod(number, len(TOPICS))
    return f"{KINDS[kind]} {TOPICS[first]} {TOPICS[second]}\n"


def _tastes(kinds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    tastes = np.full((kinds, len(STYLES)), FLATTERY_TASTE)
    plain = [place for place, style in enumerate(STYLES) if style != FLATTERY]
    for kind in range(kinds):
        tastes[kind, plain] = rng.permutation(TASTES)
    return tastes
