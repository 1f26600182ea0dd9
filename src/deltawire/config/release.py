"""The section of releases to live users: gate, canary, and the tests that decide."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from deltawire.config.base import Count, Positive, Section

_Share = Annotated[float, Meta(gt=0, lt=1)]
_Margin = Annotated[float, Meta(ge=0, lt=1)]
DEFAULT_STAGES = [0.01, 0.05, 0.25, 0.5]
Guardrail = Literal[
    "error",
    "left",
    "slow",
    "broken_call",
    "cut_off",
    "long",
    "silent",
    "refusal",
    "question",
    "hedging",
    "repetition",
]
DEFAULT_GUARDRAILS: dict[Guardrail, float] = {
    "error": 0.01,
    "left": 0.02,
    "slow": 0.02,
    "broken_call": 0.01,
    "cut_off": 0.02,
    "long": 0.05,
    "silent": 0.05,
    "refusal": 0.02,
    "question": 0.05,
    "hedging": 0.05,
    "repetition": 0.01,
}
"""Share of answers that a candidate may add to each: failed or not ended in time, left by their
client before the end, slow, with a broken tool call, cut off
at the token limit, long, or without feedback; and those that a reward may not see: refusals,
questions in place of work, hedging, repetition (`deltawire.live.capture.marks`)."""


class ReleaseConfig(Section, frozen=True, kw_only=True):
    """How a new version comes to serve users (`deltawire.live.release`).

    Outcomes are scaled to 0 … 1, and all margins are differences on that scale.

    Example::

        [live.release]
        metric = "accept"
        margin = 0.02
        stages = [0.05, 0.25, 0.5]

        [live.release.gate]
        accuracy = 0.02
    """

    metric: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")] = "reward"
    """The deciding metric: ``reward``, or a kind of feedback, which counts 0 if not reported.
    `LiveConfig.ranges` says which of its values are good."""
    low: float | None = None
    high: float | None = None
    """The metric's bounds in place of its range."""
    margin: Annotated[float, Meta(gt=0, lt=1)] = 0.02
    """A candidate is promoted once it is shown not to be worse by more than this."""
    creep: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """The loss of all promotions together, since a person last chose the version that serves:
    each candidate is tested with half of what is left as its margin, ``margin`` at most. 0: nothing
    bounds the sum."""
    hold_back: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of users who get answers of an old version. Later versions are compared with it, which
    finds losses that are too small for a canary and add up; once they are shown to be worse, the
    old version serves all users again. Needs three replicas at each gateway. 0 turns it off."""
    error_rate: Annotated[float, Meta(gt=0, lt=0.5)] = 0.05
    """Probability of a false promotion, and of a false rollback, over a whole canary."""
    stages: Annotated[list[_Share], Meta(min_length=1, max_length=16)] = field(
        default_factory=DEFAULT_STAGES.copy
    )
    """Rising shares of users that see the candidate; after the last it is promoted, to all."""
    stage_outcomes: Count = 100
    """Outcomes of the candidate before the next stage begins."""
    max_outcomes: Count = 10_000
    """Outcomes of both arms in the last stage after which an undecided canary gives way to a newer
    candidate; after twice as many it ends, and its users return to the serving version."""
    outcome_after_s: Positive = 3600.0
    """An answer's outcome is what was reported within this time after the request."""
    horizon_s: Positive = 3600.0
    """A user's outcome is the mean over the answers to all requests within this time after the
    user's first request in the canary, and touches a guardrail if one of them does."""
    unit: Literal["user", "answer"] = "user"
    """Count each user once in a canary, or every answer as if it were independent."""
    slow_s: Positive = 10.0
    """An answer whose first token takes longer is slow."""
    guardrails: dict[Guardrail, _Margin] = field(default_factory=DEFAULT_GUARDRAILS.copy)
    """Rates that may not rise by more than this."""
    long_tokens: Count = 1024
    """An answer of more tokens is long."""
    gate: dict[Annotated[str, Meta(max_length=64)], _Margin] = field(
        default_factory=lambda: {"accuracy": 0.02}
    )
    """The evaluation gate: by how much each held-out accuracy may be below the serving version's;
    ``accuracy`` is that of the whole set, other names are named sets. Empty: no gate."""
    measure_again: bool = True
    """The evaluator measures the version that serves again for each candidate, and the gate
    compares both: its own results let it pass, so they are too good. Costs the sampled answers of
    an evaluation once more, and a second model in the evaluator's memory, which ``deltawire plan``
    does not count. Without decisions in the bucket it costs nothing."""
    gap: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """An alarm is raised once users are shown to see less of a candidate's held-out gain than this:
    its gain in the metric is smaller than that in held-out accuracy by more."""
    gate_wait_s: Positive = 86_400.0
    """A candidate that is not evaluated, or not compared in its shadow, within this time is held.
    One that the gate held as undecided goes on to users if none newer is evaluated within it."""
    shadow: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Before the canary, the candidate answers copies of so many requests, unseen by users, and the
    guardrails are judged on them; 0: no shadow."""
    shadow_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the requests that may be captured of which a copy is made."""
    estimate_answers: Annotated[int, Meta(ge=0, le=100_000)] = 200
    """The evaluator scores so many logged answers with each version that it measures, the newest
    that have an outcome, to estimate the version's metric before users see it; 0 is never."""
    estimate_clip: Annotated[float, Meta(ge=0, le=1e9)] = 10.0
    """The largest ratio of probabilities that an answer counts with in that estimate; 0: no
    limit."""
    estimate_mass: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """No estimate if ratios leave out more than this share of the version's own answers."""
    estimate_least: Annotated[float, Meta(ge=2, le=1e6)] = 30.0
    """No estimate below this effective sample size."""
    pause_s: Annotated[float, Meta(ge=0, le=1e6)] = 600.0
    """After three candidates in a row that the evaluation gate stopped, learners make no groups for
    so long, and no candidate is tried; after each further one twice as long as before. 0: never."""
    every_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Time between two candidates, at least."""
    restore: bool = True
    """After a rollback, the trainer publishes the restored version's weights as a new version and
    trains on from there; false: it trains on from its newest version."""

    def contradiction(self) -> tuple[str, str] | None:
        """Returns an error message and a hint if the values contradict each other, else None."""
        if self.stages != sorted(set(self.stages)):
            return "live.release.stages must rise", "such as [0.01, 0.05, 0.25, 0.5]"
        if self.shadow and not self.guardrails.keys() - {"silent"}:
            return (
                "live.release.shadow judges guardrails, and there are none that copies can touch",
                "set live.release.guardrails, or shadow to 0",
            )
        low = 0.0 if self.low is None else self.low
        high = 1.0 if self.high is None else self.high
        if low >= high:
            return f"live.release.low {low:g} is not below live.release.high {high:g}", "set both"
        return None
