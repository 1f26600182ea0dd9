"""Sequential tests: compare two arms again and again while outcomes arrive, at one error rate.

Each test keeps the wealth of a bettor. Under the null hypothesis wealth is a nonnegative
supermartingale that begins at 1, so the probability that it ever reaches 1/α is at most α (Ville's
inequality), however often it is looked at. Source: Waudby-Smith and Ramdas 2024, "Estimating means
of bounded random variables by betting".

`ArrivalDifference` compares the arms of a canary. Each unit, a user or an answer, has one payoff,
in the order in which the units asked:

    D = ((1 − s) z − s (1 − z)) (y − m),    wealth(λ) ← wealth(λ) · (1 + λ (D − s (1 − s) δ)),

where z is 1 if the unit was assigned to the candidate, which happened with the known probability s,
y in [0, 1] is its outcome and m the mean of earlier outcomes of both arms. Whatever the level of
all outcomes does meanwhile, E[D | past] = s (1 − s) (E[y | z = 1] − E[y | z = 0]), so under the
null hypothesis, a difference of at most δ at each time, no factor has a mean above 1. Only the
assignment must be random; outcomes may drift, jump and depend on earlier ones. Bets λ keep each
factor positive.

`ArmDifference` compares pairs, of a shadow or of a gate: D = y − y′ of two answers to one request.
`AssignmentShare` tests whether users were assigned as they should have been, by a Beta mixture
(Lindon and Malek 2022, "Anytime-valid inference for multinomial count data").

All tests hold the bets of a grid in equal parts, since the best one depends on the unknown
difference.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BETS: Final = 12
"""Bets of each grid."""
SMALLEST_BET: Final = 0.02
LARGEST_BET: Final = 0.9
"""The largest bet, as a share of the one that could lose everything."""
ARRIVAL_BETS: Final[Array] = np.geomspace(SMALLEST_BET, 4.0, BETS)
"""The bets on arms: the best one is about (difference − δ) / (variance of an outcome)."""
BLOCK: Final = 64
"""Factors that are multiplied before their logarithm is taken: too few to overflow."""
ROW: Final = 256
"""Factors of one time from which whole rows are multiplied."""


def bets_of(tolerance: float) -> Array:
    """Returns the grid of bets for a null hypothesis of a difference of at most ``tolerance``."""
    grid: Array = np.geomspace(SMALLEST_BET, LARGEST_BET, BETS) / (1 + tolerance)
    return grid


class ArrivalDifference:
    """Evidence that the candidate's outcomes exceed the serving version's by more than
    ``tolerance`` (``sign`` 1), or fall below them by more (``sign`` −1).

    ``shape`` is that of independent canaries that are tested at once, in simulations.

    Example::

        test = ArrivalDifference(tolerance=-0.02)
        test.add(candidate, outcomes, shares)
        test.log_evidence >= math.log(1 / 0.05)
    """

    def __init__(self, *, tolerance: float, sign: int = 1, shape: tuple[int, ...] = ()) -> None:
        self.tolerance = tolerance
        self.sign = sign
        self.log_wealth = np.zeros((*shape, BETS))
        self._count = 0
        self._total = np.zeros(shape)
        self._weights = np.zeros((2, *shape))
        self._sums = np.zeros((2, *shape))

    def add(self, candidate: Array, outcomes: Array, shares: Array) -> Array:
        """Adds units ``[..., units]`` in the order in which they asked: 1 for those of the
        ``candidate``, their outcomes in [0, 1], and the candidate's share when they were assigned.
        Returns the log of the evidence after each of them."""
        units = outcomes.shape[-1]
        shares = np.broadcast_to(shares, outcomes.shape)
        before = np.cumsum(outcomes, axis=-1) - outcomes + self._total[..., None]
        means = (0.5 + before) / (1 + self._count + np.arange(units))
        self._total = self._total + outcomes.sum(axis=-1)
        self._count += units
        mine, theirs = (1 - shares) * candidate, shares * (1 - candidate)
        for place, weights in enumerate((mine, theirs)):
            self._weights[place] += weights.sum(axis=-1)
            self._sums[place] += (weights * outcomes).sum(axis=-1)
        expected = shares * (1 - shares) * self.tolerance
        gains = self.sign * (mine - theirs) * (outcomes - means) - expected
        near, far = (means, 1 - means) if self.sign > 0 else (1 - means, means)
        # The largest loss that this unit can cause, known before its arm and its outcome are.
        losses = np.maximum((1 - shares) * near, shares * far) + expected
        most = LARGEST_BET / np.maximum(losses, 1e-9)
        path: Array = np.empty((units, self._total.size))
        gains, most = _by_time(gains), _by_time(most)
        wealth: Array = self.log_wealth.reshape(-1, BETS)
        buffer = np.empty((min(BLOCK, units), BETS, self._total.size))
        for begin in range(0, units, BLOCK):
            block = slice(begin, begin + BLOCK)
            factors = buffer[: min(BLOCK, units - begin)]
            np.minimum(ARRIVAL_BETS[:, None], most[block, None, :], out=factors)
            factors *= gains[block, None, :]
            factors += 1
            _multiply_up(factors)
            top = wealth.max(axis=-1)
            held = np.exp(wealth - top[:, None]) / BETS
            path[block] = top + np.log(np.einsum("tbc,cb->tc", factors, held))
            wealth = wealth + np.log(factors[-1].T)
        self.log_wealth = wealth.reshape(*self._total.shape, BETS)
        return np.moveaxis(path, 0, -1).reshape(outcomes.shape)

    def keep(self, canaries: NDArray[np.bool_]) -> None:
        """Goes on with these canaries of a simulation only, as the others have ended."""
        self.log_wealth, self._total = self.log_wealth[canaries], self._total[canaries]
        self._weights, self._sums = self._weights[:, canaries], self._sums[:, canaries]

    @property
    def mean(self) -> Array:
        """The difference of the arms' means, candidate less serving. Units weigh as much as in the
        payoffs, so that both arms count each time alike; 0 before both have outcomes."""
        seen = (self._weights > 0).all(axis=0)
        means = self._sums / np.where(self._weights > 0, self._weights, 1)
        return np.where(seen, means[0] - means[1], 0.0)

    @property
    def log_evidence(self) -> Array:
        """The logarithm of the wealth: a test at error rate α rejects from log(1/α) on."""
        found: Array = np.logaddexp.reduce(self.log_wealth, axis=-1) - math.log(BETS)
        return found


def _by_time(values: Array) -> Array:
    """Return ``[..., units]`` as ``[units, canaries]``, so that one time's values are adjacent."""
    lanes = math.prod(values.shape[:-1])
    return np.ascontiguousarray(values.reshape(lanes, values.shape[-1]).T)


def _multiply_up(factors_TBC: Array) -> None:
    """Replace the factors by their running products over time, in place.

    With many canaries, one product of whole rows is twice as fast as `numpy.cumprod`, which goes
    element by element; both multiply in the same order.
    """
    if factors_TBC[0].size < ROW:
        np.cumprod(factors_TBC, axis=0, out=factors_TBC)
        return
    for place in range(1, len(factors_TBC)):
        np.multiply(factors_TBC[place], factors_TBC[place - 1], out=factors_TBC[place])


class ArmDifference:
    """Evidence that the mean difference of pairs is larger than ``tolerance`` (``sign`` 1), or that
    the mean of its negative is (``sign`` −1).

    ``mean`` is the mean difference so far. ``log_wealth`` has one entry for each bet.

    Example::

        test = ArmDifference(tolerance=-0.02)
        test.add(candidate - serving)
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
