"""Figures of the controller: the setting that its newest decision gives, and its moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from deltawire.dashboard.figure import Figure
from deltawire.dashboard.state import RunState
from deltawire.estimates import BudgetSetting


def _setting(of: Callable[[BudgetSetting], int]) -> Callable[[RunState], int | None]:
    """A value of the newest setting; None without a controller."""

    def newest(state: RunState) -> int | None:
        found = state.newest_decision
        return None if found is None else of(found.after)

    return newest


def _moves(state: RunState) -> int | None:
    return sum(one.moved for one in state.decisions.values()) if state.decisions else None


def _price(state: RunState) -> float | None:
    found = state.newest_decision
    return None if found is None else sum(found.price.values())


BUDGET_FIGURES: Final = (
    Figure(
        "budget_thinking",
        "",
        "Thinking budget that the controller set last, in tokens",
        _setting(lambda one: one.thinking),
        metric="budget_thinking_tokens",
        tracked="budget/thinking",
    ),
    Figure(
        "budget_completions",
        "",
        "Completions of a prompt that the controller set last",
        _setting(lambda one: one.completions),
        metric="budget_completions",
        tracked="budget/completions",
    ),
    Figure(
        "budget_steps",
        "",
        "Optimizer steps of a version that the controller set last",
        _setting(lambda one: one.steps),
        metric="budget_optimizer_steps",
        tracked="budget/steps",
    ),
    Figure(
        "budget_price",
        "",
        "Price of a version in tokens: sampled, trained, published, environment",
        _price,
        metric="budget_version_tokens",
        tracked="budget/price",
    ),
    Figure(
        "budget_moves",
        "",
        "Decisions of the controller that moved a setting",
        _moves,
        metric="budget_moves",
    ),
)
