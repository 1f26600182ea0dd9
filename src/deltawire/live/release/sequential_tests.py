"""Sequential tests: compare two arms again and again while outcomes arrive, at one error rate.

Each test keeps the wealth of a bettor. Under the null hypothesis wealth is a nonnegative
supermartingale that begins at 1, so the probability that it ever reaches 1/α is at most α (Ville's
inequality), however often it is looked at. Source: Waudby-Smith and Ramdas 2024, "Estimating means
of bounded random variables by betting".

`ArmDifference` compares means of outcomes in [0, 1]. An arm with the smaller share of users gives
one outcome to each payoff, the other arm the mean of as many as it has more users:

    D = y − mean(y′₁ … y′ᵣ),    wealth(λ) ← wealth(λ) · (1 + λ (D − d₀)),

with a null hypothesis E[D] ≤ d₀ and bets 0 < λ < 1 / (1 + d₀), which keep wealth positive. The test
holds all bets of a grid in equal parts, since the best one depends on the unknown difference.
`AssignmentShare` tests whether users were assigned as they should have been, by a Beta mixture
(Lindon and Malek 2022, "Anytime-valid inference for multinomial count data").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BETS: Final = 12
"""Bets of the grid, from `SMALLEST_BET` to `LARGEST_BET` of the largest possible one."""
SMALLEST_BET: Final = 0.02
LARGEST_BET: Final = 0.9
MAX_GROUPED: Final = 1 << 10
"""Outcomes of the larger arm that one payoff averages, at most."""


def bets_of(tolerance: float) -> Array:
    """Returns the grid of bets for a null hypothesis of a difference of at most ``tolerance``."""
    grid: Array = np.geomspace(SMALLEST_BET, LARGEST_BET, BETS) / (1 + tolerance)
    return grid


def grouped_outcomes(share: float) -> tuple[int, int]:
    """Returns how many outcomes of the candidate and of the serving arm one payoff takes, where the
    candidate has this ``share`` of users."""
    if not 0 < share < 1:
        raise ValueError(f"the share {share} gives one arm no users")
    other = (1 - share) / share
    if other >= 1:
        return 1, min(max(round(other), 1), MAX_GROUPED)
    return min(max(round(1 / other), 1), MAX_GROUPED), 1


def payoffs(candidate: Sequence[float], serving: Sequence[float], share: float) -> Array:
    """Returns the differences D of two arms' outcomes, in the order of arrival; outcomes that do
    not fill a group wait for the next call."""
    one, other = grouped_outcomes(share)
    count = min(len(candidate) // one, len(serving) // other)
    mine = np.asarray(candidate[: count * one], float).reshape(count, one).mean(axis=1)
    theirs = np.asarray(serving[: count * other], float).reshape(count, other).mean(axis=1)
    differences: Array = mine - theirs
    return differences


class ArmDifference:
    """Evidence that one arm's mean exceeds the other's by more than ``tolerance`` (−1 to 1).

    With ``sign`` −1 the serving arm's mean is tested against the candidate's. Payoffs of several
    stages, each with its share, may follow each other. ``log_wealth`` has one entry for each bet.

    Example::

        test = ArmDifference(tolerance=-0.02)
        test.add(payoffs(candidate, serving, share=0.25))
        test.log_evidence >= math.log(1 / 0.05)
    """

    def __init__(self, *, tolerance: float, sign: int = 1) -> None:
        self.tolerance = tolerance
        self.sign = sign
        self.payoffs = 0
        self.mean = 0.0
        self.log_wealth = np.zeros(BETS)
        self._bets = bets_of(tolerance)

    def add(self, differences: Array) -> None:
        """Adds payoffs, candidate less serving."""
        self.add_counted(differences, np.ones(len(differences)))

    def add_counted(self, differences: Array, counts: Array) -> None:
        """Adds each payoff as often as ``counts`` says. Wealth does not depend on their order, so
        counts of several processes may be added."""
        added = float(counts.sum())
        if not added:
            return
        gains = self.sign * differences - self.tolerance
        self.log_wealth += counts @ np.log1p(np.outer(gains, self._bets))
        self.payoffs += int(added)
        self.mean += (float(counts @ differences) - added * self.mean) / self.payoffs

    @property
    def log_evidence(self) -> float:
        """The logarithm of the wealth: a test at error rate α rejects from log(1/α) on."""
        return float(np.logaddexp.reduce(self.log_wealth)) - math.log(BETS)


def log_evidence_path(differences: Array, *, tolerance: float, sign: int = 1) -> Array:
    """Returns the logarithm of the wealth after each payoff, of one or of many simulations.

    ``differences`` are ``[..., payoffs]``. It is what `ArmDifference` computes step by step.
    """
    gains, place = np.unique(sign * differences - tolerance, return_inverse=True)
    table = np.log1p(np.outer(bets_of(tolerance), gains))
    wealth = np.cumsum(table[:, place.reshape(differences.shape)], axis=-1)
    most = wealth.max(axis=0)
    path: Array = most + np.log(np.exp((wealth - most).astype(np.float32)).mean(axis=0))
    return path


class AssignmentShare:
    """Evidence that users are not assigned to the candidate with the stated probability.

    Each stage has its share; their evidence multiplies, because a user counts once.

    Example::

        check = AssignmentShare()
        check.add(candidates=48, users=1000, share=0.05)
        check.log_evidence
    """

    def __init__(self) -> None:
        self.log_evidence = 0.0

    def add(self, *, candidates: int, users: int, share: float) -> None:
        """Adds the users of one stage. A mixture over the true share, Beta with mean ``share``,
        bets against the stated one."""
        strength = 100.0
        one, other = strength * share, strength * (1 - share)
        fitted = _log_beta(one + candidates, other + users - candidates) - _log_beta(one, other)
        stated = candidates * math.log(share) + (users - candidates) * math.log1p(-share)
        self.log_evidence += fitted - stated


def _log_beta(one: float, other: float) -> float:
    return math.lgamma(one) + math.lgamma(other) - math.lgamma(one + other)


def log_threshold(error_rate: float) -> float:
    """Returns the logarithm of the evidence from which a test at this error rate rejects."""
    return math.log(1 / error_rate)
