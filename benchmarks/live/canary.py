"""``false_promotion_rate`` and the other keys of simulated canaries.

Each canary has the stages of the default configuration, one outcome a user, and the tests of
`deltawire.live.release`, which are looked at after every payoff: the metric with a base rate of
`RATE`, and all ten guardrails, whose rates do not change. A look rolls back before it promotes.

- ``false_promotion_rate``: the candidate is worse by exactly the margin.
- ``false_rollback_rate``: it is equal.
- ``good_promotion_rate``: it is better by `EFFECT`, and promoted within the planned answers.
- ``regression_found_after``: it is worse by `EFFECT`. The median of the answers until it is rolled
  back, over those that a one-sided test of a fixed number of answers needs for an error rate of
  0.05 and a power of 0.95, at a share of 0.5. The details have the same over all stages.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.config.release import ReleaseConfig
from deltawire.live.release.evidence import error_budget, planned_answers
from deltawire.live.release.sequential_tests import (
    grouped_outcomes,
    log_evidence_path,
    log_threshold,
)

CANARIES = 1000
RATE = 0.6
EFFECT = 0.05
GUARDED_RATES = {
    "error": 0.01,
    "slow": 0.05,
    "broken_call": 0.02,
    "cut_off": 0.05,
    "long": 0.1,
    "silent": 0.4,
    "refusal": 0.05,
    "question": 0.15,
    "hedging": 0.1,
    "repetition": 0.02,
}
NEVER = np.iinfo(np.int64).max

Array = NDArray[np.float64]


class Simulated(NamedTuple):
    """The end of each canary, and after how many answers."""

    promoted: NDArray[np.bool_]
    rolled_back: NDArray[np.bool_]
    answers: NDArray[np.int64]


def _rows(values: Array, group: int) -> Array:
    count = len(values) // group
    means: Array = values[: count * group].reshape(count, group).mean(axis=1)
    return means


def _one(
    rng: np.random.Generator, release: ReleaseConfig, change: float, lengths: list[int]
) -> tuple[str, int]:
    """Simulate one canary; returns how it ended and after how many answers."""
    budget = error_budget(release)
    rates = {"metric": RATE} | {name: GUARDED_RATES[name] for name in release.guardrails}
    paid: dict[str, list[Array]] = {name: [] for name in rates}
    times: list[NDArray[np.int64]] = []
    begun = 0
    for share, length in zip(release.stages, lengths, strict=True):
        on = rng.random(length) < share
        mine, theirs = np.flatnonzero(on), np.flatnonzero(~on)
        one, other = grouped_outcomes(share)
        if share != release.stages[-1]:
            mine = mine[: release.stage_outcomes]
            end = int(mine[-1]) + 1
            theirs = theirs[theirs < end]
        else:
            end = length
        count = min(len(mine) // one, len(theirs) // other)
        last_mine = mine[one - 1 :: one][:count]
        times.append(begun + 1 + np.maximum(last_mine, theirs[other - 1 :: other][:count]))
        for name, rate in rates.items():
            shift = change if name == "metric" else 0.0
            of_mine = (rng.random(len(mine)) < rate + shift).astype(float)
            of_theirs = (rng.random(len(theirs)) < rate).astype(float)
            paid[name].append(_rows(of_mine, one)[:count] - _rows(of_theirs, other)[:count])
        begun += end
    last = len(times[-1])
    at = np.concatenate(times)
    metric = np.concatenate(paid.pop("metric"))
    harm = _first(log_evidence_path(metric, tolerance=0.0, sign=-1), budget.rollback)
    path = log_evidence_path(metric, tolerance=-release.margin)
    path[: len(at) - last + release.stage_outcomes] = -math.inf
    good = _first(path, budget.promotion)
    for name, most in release.guardrails.items():
        until = min(harm, good, len(at) - 1) + 1  # Nothing later counts.
        path = log_evidence_path(np.concatenate(paid[name])[:until], tolerance=most)
        harm = min(harm, _first(path, budget.guardrail))
    if min(harm, good) == NEVER:
        return "undecided", begun
    ended = "rollback" if harm <= good else "promote"
    return ended, int(at[min(harm, good)])


def _first(path: Array, error_rate: float) -> int:
    crossed = path >= log_threshold(error_rate)
    return int(crossed.argmax()) if crossed.any() else int(NEVER)


def simulate(
    release: ReleaseConfig, change: float, *, seed: int, canaries: int = CANARIES, last: int
) -> Simulated:
    """Returns the ends of canaries whose candidate differs by ``change``, with at most ``last``
    answers in the last stage."""
    rng = np.random.default_rng(seed)
    early = [math.ceil(2 * release.stage_outcomes / share) for share in release.stages[:-1]]
    ends = [_one(rng, release, change, [*early, last]) for _ in range(canaries)]
    return Simulated(
        np.array([end == "promote" for end, _ in ends]),
        np.array([end == "rollback" for end, _ in ends]),
        np.array([answers for _, answers in ends]),
    )


def fixed_horizon(release: ReleaseConfig, *, effect: float = EFFECT) -> int:
    """Returns the answers of a one-sided z test of error rate 0.05 and power 0.95 with the stages'
    allocation: information adds up to ((1.6449 + 1.6449) / effect)²."""
    rates = RATE, RATE - effect
    spread = [rate * (1 - rate) for rate in rates]
    wanted, answers = (2 * 1.6448536 / effect) ** 2, 0.0
    for share in release.stages:
        information = 1 / (spread[0] / (1 - share) + spread[1] / share)
        length = release.stage_outcomes / share
        if share == release.stages[-1] or wanted <= length * information:
            return math.ceil(answers + wanted / information)
        answers += length
        wanted -= length * information
    raise AssertionError


def measure(options: Options) -> Measured:
    """Measure all four keys."""
    release, seed = ReleaseConfig(), options.seed
    single = ReleaseConfig(stages=[0.5])
    most = release.max_outcomes
    planned = planned_answers(release, effect=EFFECT, rate=RATE)
    bad = simulate(release, -release.margin, seed=seed, last=most)
    same = simulate(release, 0.0, seed=seed + 1, last=most)
    good = simulate(release, EFFECT, seed=seed + 2, last=planned[-1])
    drops = {
        name: simulate(one, -EFFECT, seed=seed + 3, last=most)
        for name, one in (("share_0.5", single), ("stages", release))
    }
    found = {
        name: float(np.median(np.where(s.rolled_back, s.answers, np.inf)))
        for name, s in drops.items()
    }
    fixed = {"share_0.5": fixed_horizon(single), "stages": fixed_horizon(release)}
    details: dict[str, Any] = {
        "canaries": CANARIES,
        "planned_answers": planned,
        "answers_until_rollback": found,
        "answers_fixed_horizon": fixed,
        "ratio_over_all_stages": found["stages"] / fixed["stages"],
        "rolled_back_at_drop": {name: float(s.rolled_back.mean()) for name, s in drops.items()},
        "promoted_at_drop": {name: float(s.promoted.mean()) for name, s in drops.items()},
        "promoted_without_difference": float(same.promoted.mean()),
        "good_answers_median": float(np.median(good.answers)),
        "good_rolled_back": float(good.rolled_back.mean()),
    }
    values = {
        "false_promotion_rate": float(bad.promoted.mean()),
        "false_rollback_rate": float(same.rolled_back.mean()),
        "good_promotion_rate": float(good.promoted.mean()),
        "regression_found_after": found["share_0.5"] / fixed["share_0.5"],
    }
    return Measured(values, details)
