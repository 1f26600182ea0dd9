"""Outcomes: the values of a canary's answers, scaled to 0 … 1, in the order in which they settle.

An answer's outcome is what was reported until a fixed age, the same for both arms. So an answer
settles at a known time, and a later look adds outcomes after those of an earlier one: the order is
what sequential tests need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deltawire.config.live import DEFAULT_REWARDS, LiveConfig
from deltawire.live.capture.guardrails import OF_EVERY_ANSWER, SILENT, AnswerFacts, touches
from deltawire.live.learning.rewards import TERMS, OwnReward, RewardRules, values_of
from deltawire.wire.captures import ENDED_EARLY, Capture, Feedback
from deltawire.wire.decisions import CANDIDATE, Decision
from deltawire.wire.receipts import SERVING

METRIC = "metric"
"""The name of the deciding metric, next to the names of guardrails."""


@dataclass(frozen=True)
class SettledAnswer:
    """One settled answer: its arm, the candidate's share when it was assigned, and its values.

    ``first`` says that it is its user's first of the canary. ``values`` are in 0 … 1: `METRIC`, and
    1 for each guardrail that it touched.
    """

    settled: float
    arm: str
    share: float
    first: bool
    values: Mapping[str, float]


@dataclass(frozen=True)
class OutcomeScale:
    """The bounds of the deciding metric, which become 0 and 1."""

    low: float
    high: float

    def scaled(self, value: float) -> float:
        """Returns the value on the scale; values outside count as its ends."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def scale_of(live: LiveConfig) -> OutcomeScale:
    """Returns the bounds of a run's metric: as configured, or the sums of the negative and of the
    positive weights of its rewards, within −1 … 1."""
    release = live.release
    low, high = 0.0, 1.0
    if release.metric == "reward":
        weights = [*(live.rewards or DEFAULT_REWARDS).values(), live.silent or 0.0]
        low = -1.0 if live.reward_function else max(math.fsum(min(w, 0) for w in weights), -1.0)
        high = 1.0 if live.reward_function else min(math.fsum(max(w, 0) for w in weights), 1.0)
    low = low if release.low is None else release.low
    high = high if release.high is None else release.high
    return OutcomeScale(low, high)


class OutcomeRules:
    """Computes the values of answers by the rules of one run.

    Example::

        rules = OutcomeRules(config.live)
        rules.values(answer, reports)
    """

    def __init__(self, live: LiveConfig) -> None:
        self._release = live.release
        self._scale = scale_of(live)
        self._rules = RewardRules(
            live.rewards or DEFAULT_REWARDS, silent=live.silent, function=live.reward_function
        )
        self._own: OwnReward | None = self._rules.load()
        counted = frozenset(live.rewards or DEFAULT_REWARDS) - TERMS.keys()
        metric = live.release.metric
        self._kinds = counted if metric == "reward" else counted | {metric}

    def assigned(self, answer: Capture, decision: Decision) -> float | None:
        """Returns the candidate's share when an answer of the ``decision``'s canary was assigned to
        its arm at random; None for any other answer, and for one that another version than its
        arm's drew: if that happens to one arm more than to the other, the sample ratio shows it."""
        versions = {SERVING: decision.serving.version}
        if decision.candidate is not None:
            versions[CANDIDATE] = decision.candidate.version
        share = answer.propensity if answer.arm == CANDIDATE else 1 - answer.propensity
        if not 0 < share < 1 or not answer.user or answer.arm not in versions:
            return None
        drawn = {version for version, _ in answer.spans}
        return share if drawn <= {versions[answer.arm]} else None

    def values(self, answer: Capture, reports: Iterable[Feedback]) -> dict[str, float]:
        """Returns the values of a settled answer: `METRIC`, and 1 for each guardrail that it
        touched. An answer that ended early has the worst metric. One that may not be stored has no
        value for the guardrails that need its text or tokens."""
        until = answer.at + self._release.outcome_after_s
        values = values_of(report for report in reports if report.received <= until)
        if self._release.metric == "reward":
            reward = self._rules.reward(values, answer, self._own)
            value = 0.0 if reward is None else reward
        else:
            value = values.get(self._release.metric, 0.0)
        early = answer.finish in ENDED_EARLY  # Not silence: the user got no answer.
        found = {METRIC: 0.0 if early else self._scale.scaled(value)}
        facts = AnswerFacts.of(answer)
        for name in self._release.guardrails:
            if answer.judged_only and name not in OF_EVERY_ANSWER:
                continue
            touched = touches(name, facts, self._release)
            if name == SILENT:
                touched = not any(kind in values for kind in self._kinds)
            found[name] = float(touched)
        return found
