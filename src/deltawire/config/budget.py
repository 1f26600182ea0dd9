"""The section of the compute that a run spends."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from deltawire.config.base import Count, Fraction, Section
from deltawire.config.scaffold import Scaffold

BudgetMeasure = Literal["accuracy", "greedy", "area", "reward"]
BudgetController = Literal["fixed", "auto"]


class BudgetConfig(Section, frozen=True, kw_only=True):
    """Ends a run by its forecast (`deltawire.rl.forecast`), and moves what its compute is spent on
    (`deltawire.rl.budget`).

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
    controller: BudgetController = "fixed"
    """``auto`` moves, by accuracy gained per token, between the thinking budgets of
    ``rollout.thinking.budgets`` and between the values of the three lists below. Its evaluations
    cost tokens, and in nine made-up worlds a fixed budget did better."""
    completions: Annotated[list[Annotated[int, Meta(ge=2, le=4096)]], Meta(max_length=16)] = []
    """Completions of a prompt, rising; ``rollout.group_size`` is the first used. Empty: not
    moved."""
    steps: Annotated[list[Count], Meta(max_length=16)] = []
    """Optimizer steps of a version, rising; ``train.minibatches`` is the first used. Empty: not
    moved."""
    scaffolds: Annotated[list[Scaffold], Meta(max_length=8)] = []
    """Scaffolds, of which ``rollout.scaffold`` is the first used. Empty: not moved."""
    threshold: Fraction = 0.5
    """While held-out accuracy is below this, a better scaffold comes before other moves."""
    confidence: Annotated[float, Meta(gt=0, le=10)] = 1.64
    """Standard errors by which another use of tokens must be better before the controller moves."""
    problems: Annotated[int, Meta(ge=2, le=256)] = 64
    """Held-out problems, the first ones, that each evaluation answers with every thinking budget
    and scaffold, ``evaluate.samples`` times each."""
    byte_tokens: Annotated[float, Meta(ge=0, le=1e9)] = 5e-4
    """The price of a published byte, in tokens. The default is 0.05 USD for a GB, by 0.10 USD for a
    million tokens."""
    second_tokens: Annotated[float, Meta(ge=0, le=1e12)] = 110.0
    """The price of a second of the environment, in tokens. The default is 0.04 USD for an hour of a
    core, by 0.10 USD for a million tokens."""

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

    def controller_fault(self, first: dict[str, Any]) -> tuple[str, str] | None:
        """Finds an axis that cannot be moved: the reason and what to do, or None.

        ``first`` is, by axis, the dotted key and the value that the run starts with.
        """
        for axis, (key, value) in first.items():
            values = getattr(self, axis)
            where = f"budget.{axis}"
            if not values:
                continue
            if axis != "scaffolds" and values != sorted(set(values)):
                return f"{where} do not rise", "list each value once, the smallest first"
            if len(values) > len(set(values)):
                return f"{where} names one twice", "list each once"
            if value not in values:
                reason = f"{where} lacks {key} = {value}, which the run starts with"
                return reason, f"add it to {where}, or change {key}"
        return None
