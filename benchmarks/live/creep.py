"""``creep_loss_100`` and ``creep_progress_kept``: what a lineage of 100 candidates loses or gains.

Each candidate differs from the serving version by `STEP`, for the worse or for the better, and has
`USERS` users in both arms, half of them its own, with one outcome each. Margins spend one budget
down the lineage (`deltawire.live.release.lineage`). The tests are the payoffs of
`deltawire.live.release.sequential_tests`, added up in blocks of `BLOCK` users, with the mean of
the blocks before in place of that of all earlier outcomes; they are looked at after each block.

- ``creep_loss_100``: what the serving version has lost in the end, on average, each candidate
  worse.
- ``creep_progress_kept``: of the progress of 100 candidates, each better, the mean that serves.

The details have the same without the budget, where the first must fail, and the users that a
promotion takes for some margins.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.config.release import ReleaseConfig
from deltawire.live.release.evidence import error_budget, planned_answers
from deltawire.live.release.lineage import next_margin
from deltawire.live.release.sequential_tests import (
    ARRIVAL_BETS,
    BETS,
    LARGEST_BET,
    log_threshold,
)

LINEAGES = 40
CANDIDATES = 100
STEP = 0.005
USERS = 560_000
BLOCK = 8000
RATE = 0.5
CREEP = 0.02
SHARE = 0.5
MARGINS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15)

Array = NDArray[np.float64]
_SIGNS = np.array([1.0, 1.0, -1.0, -1.0])
_OUTCOMES = np.array([1.0, 0.0, 1.0, 0.0])


class _BlockTest:
    """`ArrivalDifference` at one share, for many canaries with margins of their own."""

    def __init__(self, tolerances: Array, sign: int) -> None:
        self._expected = SHARE * (1 - SHARE) * tolerances[:, None]
        self._sign = sign
        self._wealth = np.zeros((len(tolerances), BETS))

    def add(self, counts: Array, means: Array) -> Array:
        """Adds counts of the candidate's 1 and 0 and of the serving version's 1 and 0."""
        payoffs = (1 - SHARE) * _SIGNS * (_OUTCOMES - means[:, None])
        gains = self._sign * payoffs - self._expected
        losses = (1 - SHARE) * np.maximum(means, 1 - means)[:, None] + self._expected
        bets = np.minimum(ARRIVAL_BETS, LARGEST_BET / np.maximum(losses, 1e-9))
        factors = np.log1p(bets[:, :, None] * gains[:, None, :])
        self._wealth += (factors * counts[:, None, :]).sum(axis=-1)
        evidence: Array = np.logaddexp.reduce(self._wealth, axis=-1) - math.log(BETS)
        return evidence


def promoted(
    rng: np.random.Generator, release: ReleaseConfig, margins: Array, serving: Array, change: float
) -> NDArray[np.bool_]:
    """Returns which canaries end in a promotion, one for each margin."""
    budget = error_budget(release)
    metric, worse = _BlockTest(-margins, 1), _BlockTest(np.zeros_like(margins), -1)
    open_, good = np.ones(len(margins), np.bool_), np.zeros(len(margins), np.bool_)
    ones = np.full(len(margins), 0.5)
    seen = 1
    for _ in range(USERS // BLOCK):
        mine, theirs = np.clip(serving + change, 0, 1), np.clip(serving, 0, 1)
        arms = rng.binomial(BLOCK, SHARE, len(margins))
        first, other = rng.binomial(arms, mine), rng.binomial(BLOCK - arms, theirs)
        counts = np.stack([first, arms - first, other, BLOCK - arms - other], axis=-1)
        shown = metric.add(counts.astype(float), ones / seen) >= log_threshold(budget.promotion)
        harm = worse.add(counts.astype(float), ones / seen) >= log_threshold(budget.rollback)
        good |= open_ & shown & ~harm
        open_ &= ~(shown | harm)
        ones, seen = ones + first + other, seen + BLOCK
        if not open_.any():
            break
    return good


def lineages(change: float, *, seed: int, creep: float, count: int = LINEAGES) -> tuple[Array, Any]:
    """Returns what the serving versions of ``count`` lineages gained, and how many candidates of
    each were promoted."""
    rng, release = np.random.default_rng(seed), ReleaseConfig(creep=creep)
    spent, serving, promotions = np.zeros(count), np.full(count, RATE), np.zeros(count, np.int64)
    for _ in range(CANDIDATES):
        margins = np.array([next_margin(release, one) for one in spent.tolist()])
        good = promoted(rng, release, margins, serving, change)
        serving = serving + change * good
        spent = spent + margins * good
        promotions += good
    return serving - RATE, promotions


def users_of_margins() -> dict[str, int]:
    """Returns the users that a promotion of an equal candidate takes with power 0.9, by margin."""
    release = ReleaseConfig(stages=[SHARE])
    return {
        f"{margin:g}": sum(
            planned_answers(msgspec.structs.replace(release, margin=margin), effect=0.0)
        )
        for margin in MARGINS
    }


def measure(options: Options) -> Measured:
    """Measures the keys, with the budget and without."""
    found: dict[str, dict[str, float]] = {}
    for place, creep in enumerate((CREEP, 0.0)):
        seed = options.seed + 10 * place
        worse, _ = lineages(-STEP, seed=seed, creep=creep)
        better, promotions = lineages(STEP, seed=seed + 1, creep=creep)
        found["budget" if creep else "without"] = {
            "loss": -float(worse.mean()),
            "largest_loss": -float(worse.min()),
            "progress_kept": float(better.mean()) / (STEP * CANDIDATES),
            "promoted": float(promotions.mean()),
        }
    values = {
        "creep_loss_100": found["budget"]["loss"],
        "creep_progress_kept": found["budget"]["progress_kept"],
    }
    details = {"lineages": LINEAGES, "users": USERS, "found": found}
    return Measured(values, {**details, "users_of_margins": users_of_margins()})
