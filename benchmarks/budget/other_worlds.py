"""``auto_vs_fixed_other``: the controller against all fixed thinking budgets in made-up worlds.

A world is a curve of learning, one of `CURVES`, and a rule for when longer thinking pays: at once,
late (after many steps with the middle or the long budget), or never. Each problem has a difficulty;
the probability of a right answer is σ(level + lift of the thinking budget − difficulty). The
controller is `deltawire.rl.budget.decision` with the settings of `benchmarks.budget.controlled`,
and sees noisy evaluations as a run would. Its evaluations count as spent. All arms spend the same
tokens, and each is scored, without noise, at each thinking budget.

The key is the worst world's ratio of accuracies, the controller's over that of the best fixed
budget in hindsight: the geometric mean over thinking budgets of the test and over `SEEDS` seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.budget.cells import mean_and_error
from benchmarks.budget.controlled import ARMS, EVERY, FIXED, PROBLEMS, TOKENS, run_config
from benchmarks.budget.other_curves import OTHERS, SHAPES, rise
from benchmarks.training.keys import Measured, Options
from deltawire.config import RunConfig
from deltawire.estimates import SettingScore
from deltawire.events import Evaluated
from deltawire.rl.budget.decision import BudgetHistory

SEEDS: Final = 20
LENGTHS: Final = (1, 3)
"""Tokens of an arm, in multiples of `TOKENS`; the key is about the first."""
BUDGETS: Final = tuple(ARMS["auto"])
TEST: Final = 400
STRENGTH: Final = 0.7
"""Log-odds of a right answer that twice the thinking adds, where it pays."""
SPREAD: Final = 1.5
"""The standard deviation of difficulties, in log-odds."""
CURVES: Final = OTHERS
Lift = Callable[[int, float], float]


def _at_once(budget: int, _: float) -> float:
    return STRENGTH * float(np.log2(budget / BUDGETS[1]))


def _late(budget: int, practice: float) -> float:
    learned = float(rise(0.5, 6.0)(np.array([practice]))[0]) if practice > 0 else 0.0
    return 2 * STRENGTH * float(np.log2(budget / BUDGETS[0])) * learned


def _never(_: int, __: float) -> float:
    return 0.0


PAYS: Final[dict[str, Lift]] = {"at once": _at_once, "late": _late, "never": _never}
"""By name, the log-odds that a thinking budget adds after so much practice with longer thinking; 1
is `TOKENS` spent with the middle budget."""


class World:
    """One run's policy: what it answers, and how it learns.

    ``length`` is the number of versions that the middle budget affords with `TOKENS`.
    """

    def __init__(self, curve: str, pays: str, seed: int, length: float) -> None:
        rng = np.random.default_rng((seed, 47))
        self._shape, self._lift, self._length = SHAPES[curve], PAYS[pays], length
        self._pace = float(np.exp(rng.normal(0, 0.15)))
        self._hard_P = rng.normal(0, SPREAD, PROBLEMS)
        self._hard_T = rng.normal(0, SPREAD, TEST)
        self._rng = rng
        self.versions = 0
        self.practice = 0.0

    def step(self, budget: int) -> None:
        """Makes one version of answers with a thinking budget."""
        self.versions += 1
        if budget > BUDGETS[0]:
            self.practice += self._pace * budget / BUDGETS[1] / self._length

    def _rates(self, hard: NDArray[np.float64], budget: int) -> NDArray[np.float64]:
        share = np.array([self._pace * max(self.versions, 0.5) / self._length])
        level = float(np.clip(self._shape(share)[0], 0.01, 0.99))
        odds = np.log(level / (1 - level)) + self._lift(budget, self.practice)
        return np.asarray(1 / (1 + np.exp(hard - odds)), np.float64)

    def accuracy(self, budget: int) -> float:
        """The accuracy on the test problems, without noise."""
        return float(self._rates(self._hard_T, budget).mean())

    def scores(self, config: RunConfig) -> list[SettingScore]:
        """An evaluation of every thinking budget, with the noise of its answers."""
        samples = config.evaluate.samples
        return [
            SettingScore(
                thinking=budget,
                scaffold="plain",
                correct=[
                    float(n) / samples
                    for n in self._rng.binomial(samples, self._rates(self._hard_P, budget))
                ],
                tokens=tokens_of(budget),
            )
            for budget in BUDGETS
        ]


def tokens_of(budget: int) -> float:
    """The tokens of an answer: all of the thinking budget, and one."""
    return budget + 1.0


def run(curve: str, pays: str, arm: str, seed: int, tokens: float) -> dict[str, Any]:
    """Trains one arm until its tokens are spent; returns its accuracy by thinking budget."""
    config = run_config(ARMS[arm], seed)
    answers = config.train.groups_per_step * config.rollout.group_size
    world = World(curve, pays, seed, TOKENS / (2 * answers * tokens_of(BUDGETS[1])))
    history = BudgetHistory(config) if len(ARMS[arm]) > 1 else None
    budget = ARMS[arm][(len(ARMS[arm]) - 1) // 2]
    spent = measured = 0.0
    moves = 0
    while spent < tokens:
        if history is not None and world.versions % EVERY == 0:
            scores = world.scores(config)
            cost = sum(score.tokens for score in scores) * PROBLEMS * config.evaluate.samples
            spent, measured = spent + cost, measured + cost
            event = Evaluated(
                process="evaluator",
                at=0.0,
                version=world.versions,
                accuracy=0.0,
                problems=PROBLEMS,
                seconds=0.0,
                settings=scores,
            )
            history.observe(event)
            moves += history.setting.thinking != budget
            budget = history.setting.thinking
        world.step(budget)
        spent += 2 * answers * tokens_of(budget)
    return {
        "accuracy": {number: world.accuracy(number) for number in BUDGETS},
        "budget": budget,
        "moves": moves,
        "measured": measured / spent,
    }


def compare(curve: str, pays: str, tokens: float, seeds: range) -> dict[str, Any]:
    """Compares the arms of a world: mean log accuracies, and the controller's ratio to each fixed
    budget with its standard error in logs."""
    found = {arm: [run(curve, pays, arm, seed, tokens) for seed in seeds] for arm in ARMS}
    logs = {
        arm: np.array([[np.log(one["accuracy"][b]) for b in BUDGETS] for one in cells])
        for arm, cells in found.items()
    }
    best = max(FIXED, key=lambda arm: float(logs[arm].mean()))
    own = {
        arm: np.log([one["accuracy"][one["budget"]] for one in cells])
        for arm, cells in found.items()
    }
    own_best = max(FIXED, key=lambda arm: float(own[arm].mean()))
    mean, error = mean_and_error((own["auto"] - own[own_best]).tolist())
    ratios: dict[str, dict[str, Any]] = {
        "each at its last budget": {"best": own_best, "ratio": float(np.exp(mean)), "error": error}
    }
    for arm in FIXED:
        mean, error = mean_and_error((logs["auto"] - logs[arm]).mean(1).tolist())
        ratios[arm] = {"ratio": float(np.exp(mean)), "error": error}
    return {
        "best_fixed": best,
        "ratio": ratios[best]["ratio"],
        "error": ratios[best]["error"],
        "over": ratios,
        "by_test_budget": {
            str(b): float(np.exp((logs["auto"] - logs[best])[:, place].mean()))
            for place, b in enumerate(BUDGETS)
        },
        "accuracy": {arm: float(np.exp(values.mean())) for arm, values in logs.items()},
        "ended_at": [one["budget"] for one in found["auto"]],
        "moves": float(np.mean([one["moves"] for one in found["auto"]])),
        "evaluations": float(np.mean([one["measured"] for one in found["auto"]])),
    }


def measure(options: Options) -> Measured:
    """Measures all worlds."""
    seeds = range(options.seed, options.seed + SEEDS)
    details: dict[str, Any] = {
        f"{curve}, longer pays {pays}, {times} x": compare(curve, pays, times * TOKENS, seeds)
        for times in LENGTHS
        for curve in CURVES
        for pays in PAYS
    }
    worst = min(one["ratio"] for name, one in details.items() if name.endswith(" 1 x"))
    return Measured({"auto_vs_fixed_other": worst}, details)
