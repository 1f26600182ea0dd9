"""The section of the compute that a run spends."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from deltawire.config.base import Section

BudgetMeasure = Literal["accuracy", "greedy", "area", "reward"]


class BudgetConfig(Section, frozen=True, kw_only=True):
    """Ends a run by its forecast (`deltawire.rl.forecast`).

    Example::

        [budget]
        stop_when = 0.005

        [evaluate]
        every = 20
    """

    stop_when: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Finish the run once twice the compute would gain less than this, at the upper end of the
    forecast's 90 % interval; 0 never does."""
    measure: BudgetMeasure = "accuracy"
    """The gain is one of held-out ``accuracy``, of ``greedy`` accuracy, of the ``area`` under
    accuracy over thinking budgets, or of the mean ``reward`` of the steps."""

    def contradiction(self, *, evaluated: bool, budgets: bool) -> tuple[str, str] | None:
        """Finds a measure that the run does not have: the reason and what to do, or None.

        ``evaluated``: the run has an evaluator; ``budgets``: it measures several thinking budgets.
        """
        if not self.stop_when or self.measure == "reward":
            return None
        if not evaluated:
            reason = f"budget.stop_when needs held-out {self.measure}, and evaluate.every is 0"
            return reason, 'set evaluate.every, or budget.measure = "reward"'
        if self.measure == "area" and not budgets:
            reason = 'budget.measure = "area" without evaluate.budgets'
            return reason, "list thinking budgets in evaluate.budgets"
        return None
