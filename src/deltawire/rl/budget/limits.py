"""Limits: what the controller may move, and which settings an evaluator measures for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from deltawire.config import RunConfig
from deltawire.estimates import BudgetSetting

Place = tuple[int, str]
"""A thinking budget (0: the run has none) and a scaffold: what an answer is measured with."""


@dataclass(frozen=True)
class BudgetLimits:
    """The values of each axis, in order, and the setting that a run starts with.

    An axis with one value is not moved.

    Example::

        limits = BudgetLimits.of(config)
        limits.first                  # BudgetSetting(thinking=512, completions=8, …)
        limits.allows(setting)
    """

    thinking: tuple[int, ...]
    completions: tuple[int, ...]
    steps: tuple[int, ...]
    scaffolds: tuple[str, ...]
    first: BudgetSetting

    @classmethod
    def of(cls, config: RunConfig) -> BudgetLimits:
        """The limits of a configuration: thinking starts at the middle budget, of two at the
        smaller; the others start as configured."""
        budget, thinking = config.budget, config.rollout.thinking
        budgets = tuple(thinking.budgets) if thinking is not None else (0,)
        first = BudgetSetting(
            thinking=budgets[(len(budgets) - 1) // 2],
            completions=config.rollout.group_size,
            steps=config.train.minibatches,
            scaffold=config.rollout.scaffold,
        )
        return cls(
            budgets,
            tuple(budget.completions) or (first.completions,),
            tuple(budget.steps) or (first.steps,),
            tuple(budget.scaffolds) or (first.scaffold,),
            first,
        )

    def allows(self, setting: BudgetSetting) -> bool:
        """Returns whether every value is one of the axis's."""
        return (
            setting.thinking in self.thinking
            and setting.completions in self.completions
            and setting.steps in self.steps
            and setting.scaffold in self.scaffolds
        )

    @property
    def line(self) -> str:
        """The axes that may be moved, for people: ``thinking (256, 512, 1024; first 512)``."""
        axes = (
            ("thinking", self.thinking, self.first.thinking),
            ("completions", self.completions, self.first.completions),
            ("optimizer steps", self.steps, self.first.steps),
            ("scaffold", self.scaffolds, self.first.scaffold),
        )
        return ", ".join(
            f"{name} ({', '.join(map(str, values))}; first {first})"
            for name, values, first in axes
            if len(values) > 1
        )

    @property
    def places(self) -> list[Place]:
        """Every thinking budget with every scaffold."""
        return [(budget, scaffold) for scaffold in self.scaffolds for budget in self.thinking]

    def answers(self, now: BudgetSetting) -> dict[str, BudgetSetting]:
        """By name, the settings next to ``now`` that change how a problem is answered."""
        found = {}
        for name, value in _next_to(self.thinking, now.thinking):
            key = "longer thinking" if name == "more" else "shorter thinking"
            found[key] = msgspec.structs.replace(now, thinking=value)
        for scaffold in self.scaffolds:
            if scaffold != now.scaffold:
                found[f"scaffold {scaffold}"] = msgspec.structs.replace(now, scaffold=scaffold)
        return found

    def training(self, now: BudgetSetting) -> dict[str, BudgetSetting]:
        """By name, the settings next to ``now`` that change only how the model is trained."""
        found = {}
        for _, value in _next_to(self.completions, now.completions):
            found[f"{value} completions"] = msgspec.structs.replace(now, completions=value)
        for _, value in _next_to(self.steps, now.steps):
            found[f"{value} optimizer steps"] = msgspec.structs.replace(now, steps=value)
        return found


def _next_to(values: Sequence[int], now: int) -> list[tuple[str, int]]:
    """The next larger and the next smaller value, as far as there are any."""
    place = values.index(now)
    found = []
    if place + 1 < len(values):
        found.append(("more", values[place + 1]))
    if place:
        found.append(("less", values[place - 1]))
    return found
