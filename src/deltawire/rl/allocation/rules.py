"""Rules: what happens to a prompt after its pilot, as pure functions of its rewards.

========== ==================================================== ================================
policy     a prompt with unequal rewards                        a prompt with equal rewards
========== ==================================================== ================================
fixed      trained on                                           trained on, with no effect
refill     trained on                                           skipped, and another one drawn
pilot      filled; skipped above ``skip_above``, deferred below deferred if all failed, skipped if
           ``defer_below``                                      all succeeded
knapsack   as many as the budget's best use gives it            the same; none: skipped or deferred
========== ==================================================== ================================

Sources: dynamic sampling, DAPO, Yu et al. 2025 (arXiv 2503.14476), section 3.2; Pilot-Commit
(arXiv 2605.26606); Reinforce-Ada (arXiv 2510.04996) for ``enough``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deltawire.config.allocation import AllocationConfig

Verdict = Literal["train", "skip", "defer", "fill", "wait"]


@dataclass(frozen=True)
class PromptOutcome:
    """Counts a prompt's completions: how many completions were ``asked`` for, how many of the
    ``finished`` ones were ``successes``, and whether their rewards have a ``spread``, without which
    they move nothing.

    Example::

        PromptOutcome.of([1.0, 0.0, 0.0, 1.0], success_at=1.0).rate   # 0.5
    """

    asked: int
    finished: int
    successes: int
    spread: bool

    @classmethod
    def of(
        cls, rewards: Sequence[float], *, success_at: float, asked: int | None = None
    ) -> PromptOutcome:
        """Counts the rewards of completions; ``asked`` includes those that failed."""
        return cls(
            len(rewards) if asked is None else asked,
            len(rewards),
            sum(reward >= success_at for reward in rewards),
            len(set(rewards)) > 1,
        )

    @property
    def rate(self) -> float:
        """The share of finished completions that succeeded; 0 without any."""
        return self.successes / self.finished if self.finished else 0.0

    @property
    def scarcer(self) -> int:
        """The number of successes or of failures, the smaller one."""
        return min(self.successes, self.finished - self.successes)


@dataclass(frozen=True)
class PromptDecision:
    """A verdict, and how many ``more`` completions a prompt gets if it is ``fill``.

    ``wait`` means that a round of the knapsack decides.
    """

    verdict: Verdict
    more: int = 0


TRAIN, SKIP, DEFER, WAIT = (
    PromptDecision("train"),
    PromptDecision("skip"),
    PromptDecision("defer"),
    PromptDecision("wait"),
)


def decide(
    config: AllocationConfig, outcome: PromptOutcome, *, defers: int = 0, planned: int | None = None
) -> PromptDecision:
    """Returns what to do with a prompt, given the completions that it has.

    ``defers`` counts how often it was deferred. ``planned`` is the number of completions that a
    knapsack round gave it in all; None before that round.

    Example::

        config = AllocationConfig(policy="pilot", pilot=4, largest=32)
        decide(config, PromptOutcome.of([1.0, 0.0, 0.0, 0.0], success_at=1.0))   # fill, 28 more
    """
    if config.policy == "fixed":
        return TRAIN
    if config.policy == "refill":
        return TRAIN if outcome.spread else SKIP
    if config.enough and outcome.scarcer >= config.enough and outcome.spread:
        return TRAIN
    if config.policy == "knapsack":
        if planned is None:
            return WAIT
        if outcome.asked < planned:
            return PromptDecision("fill", planned - outcome.asked)
        return TRAIN if outcome.spread else _hopeless(config, outcome, defers)
    judged = outcome.asked <= config.pilot or config.stage > 0
    if judged and outcome.rate > config.skip_above:
        return SKIP
    if judged and (outcome.rate < config.defer_below or not outcome.finished):
        return _hopeless(config, outcome, defers)
    left = config.largest - outcome.asked
    if left > 0:
        return PromptDecision("fill", min(left, config.stage) if config.stage else left)
    return TRAIN if outcome.spread else _hopeless(config, outcome, defers)


def _hopeless(config: AllocationConfig, outcome: PromptOutcome, defers: int) -> PromptDecision:
    """A prompt that gets no more: tried again later if it seems hard, else skipped."""
    hard = outcome.rate < 0.5
    return DEFER if hard and defers < config.max_defers else SKIP
