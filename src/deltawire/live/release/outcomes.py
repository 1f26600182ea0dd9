"""Outcomes: the values of a canary's users, or of its answers, scaled to 0 … 1.

An answer's outcome is what was reported within a fixed time after the request, and a user's outcome
is made of all answers to requests within a fixed time after the first. Both are the same for both
arms, whatever the arms take to answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """One outcome, of an answer or of all answers of a user: its arm, the candidate's share when it
    was assigned, and its values.

    ``asked`` is the time of its first request, by which outcomes are in order. ``first`` says that
    it is its user's first of the canary. ``values`` are in 0 … 1: `METRIC`, and 1 for each
    guardrail that it touched.
    """

    asked: float
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
        its arm at random; None for any other answer. It counts for its arm whichever version drew
        it: what an arm cannot answer must not be missing in it."""
        share = answer.propensity if answer.arm == CANDIDATE else 1 - answer.propensity
        known = answer.arm == SERVING or (answer.arm == CANDIDATE and decision.candidate)
        return share if known and 0 < share < 1 and answer.user else None

    def outcome(
        self, answers: Sequence[tuple[Capture, Iterable[Feedback]]], decision: Decision
    ) -> dict[str, float]:
        """Returns the values of one unit, of whose answers each is given with its reports: the mean
        metric, and the largest value of each guardrail that is known of one of them."""
        rows = []
        for answer, reports in answers:
            row = self.values(answer, reports)
            if "error" in row and not drawn_by_its_arm(answer, decision):
                row["error"] = 1.0
            rows.append(row)
        found = {
            name: max(row[name] for row in rows if name in row)
            for name in {name for row in rows for name in row}
        }
        return found | {METRIC: math.fsum(row[METRIC] for row in rows) / len(rows)}

    def values(self, answer: Capture, reports: Iterable[Feedback]) -> dict[str, float]:
        """Returns the values of a settled answer: `METRIC`, and 1 for each guardrail that it
        touched. An answer that ended early has the worst metric. One that may not be stored has no
        value for the guardrails that need its text or tokens."""
        until = answer.asked_at + self._release.outcome_after_s
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


def drawn_by_its_arm(answer: Capture, decision: Decision) -> bool:
    """Returns whether the version of its arm drew some of an answer, as far as versions are stated:
    where it does not, another replica answered for one that could not."""
    arm = decision.candidate if answer.arm == CANDIDATE else decision.serving
    drawn = {version for version, _ in answer.spans}
    return not drawn or (arm is not None and arm.version in drawn)
