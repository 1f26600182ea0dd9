"""Adaptive sampling of answers: draws until a vote is decided, or a verifier accepts one.

A vote ends by the Beta rule of Adaptive-Consistency (arXiv 2305.11860). Of the two answers that
were given most often, v1 and v2 times, the share of the first among the two has the posterior
Beta(v1 + 1, v2 + 1) from a flat prior, and drawing stops once::

    P(share > 1/2) = sum over k = 0 .. v1 of C(v1 + v2 + 1, k) / 2^(v1 + v2 + 1) >= confidence

A verifier ends at the first answer whose score reaches ``accept``; without one, the best of
``n_max`` is returned.

Answers are drawn in waves of ``step``. The rule is asked only between waves: answers that are short
are finished first, and would otherwise be counted first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from math import comb
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_ANSWERS = 128

_Count = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]


class AdaptiveSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The option ``n_adaptive`` of a request: at most ``n_max`` answers, ``step`` at a time, of
    which one is returned.

    ``after`` is a mark: only the text after its last occurrence is voted on, such as ``####``.

    Example::

        AdaptiveSampling(n_max=16, confidence=0.9, after="####")
    """

    n_max: _Count
    by: Literal["vote", "verifier"] = "vote"
    confidence: Annotated[float, Meta(gt=0.5, lt=1)] = 0.95
    step: _Count = 2
    accept: float = 1.0
    after: Annotated[str, Meta(max_length=256)] = ""

    def read(self, answer: str) -> str:
        """The part of an answer that is voted on, in which runs of white space count as one."""
        said = answer.rpartition(self.after)[2] if self.after else answer
        return " ".join(said.split())


def certainty(first: int, second: int) -> float:
    """The probability that an answer given ``first`` times is more frequent than one that was given
    ``second`` times (the formula at the top of this module)."""
    draws = first + second + 1
    return sum(comb(draws, k) for k in range(first + 1)) / 2.0**draws


class Ballot:
    """The answers so far: which one leads, and whether enough were drawn.

    Example::

        ballot = Ballot(AdaptiveSampling(n_max=8))
        for answer in ("4", "4", "4", "4"):
            ballot.add(answer)
        ballot.ended, ballot.winner   # ("confident", 0)
    """

    def __init__(self, asked: AdaptiveSampling) -> None:
        self._asked = asked
        self._keys: list[Hashable] = []
        self._scores: list[float] = []

    def add(self, key: Hashable, score: float = 0.0) -> None:
        """Adds an answer: what is voted on, and the verifier's score."""
        self._keys.append(key)
        self._scores.append(score)

    @property
    def drawn(self) -> int:
        """The number of answers."""
        return len(self._keys)

    @property
    def wave(self) -> int:
        """The number of answers to draw next."""
        return min(self._asked.step, self._asked.n_max - self.drawn)

    @property
    def ended(self) -> str:
        """Why no more are drawn: ``confident``, ``accepted`` or ``n_max``; empty if more are."""
        if self._asked.by == "verifier":
            if any(score >= self._asked.accept for score in self._scores):
                return "accepted"
        elif self._votes and certainty(*self._votes) >= self._asked.confidence:
            return "confident"
        return "n_max" if self.drawn >= self._asked.n_max else ""

    @property
    def winner(self) -> int:
        """The place of the answer to return: the first with the best score, or with the most votes.
        Of several with as many votes the one that was given first."""
        if self._asked.by == "verifier":
            return self._scores.index(max(self._scores))
        counts = Counter(self._keys)
        return self._keys.index(max(counts, key=lambda key: counts[key]))

    def report(self) -> dict[str, Any]:
        """The member ``n_adaptive`` of the response."""
        found: dict[str, Any] = {"drawn": self.drawn, "ended": self.ended, "by": self._asked.by}
        if self._asked.by == "verifier":
            return found | {"score": self._scores[self.winner]}
        first, second = self._votes
        return found | {"votes": first, "confidence": certainty(first, second)}

    @property
    def _votes(self) -> tuple[int, ...]:
        """How often the two most frequent answers were given; empty before the first."""
        if not self._keys:
            return ()
        counts = [count for _, count in Counter(self._keys).most_common(2)]
        return (counts[0], counts[1] if len(counts) > 1 else 0)
