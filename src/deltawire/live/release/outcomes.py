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
from deltawire.config.release import ReleaseConfig
from deltawire.live.learning.records import LiveRecords
from deltawire.live.learning.rewards import TERMS, OwnReward, RewardRules, values_of
from deltawire.wire.captures import Capture
from deltawire.wire.decisions import CANDIDATE, Decision
from deltawire.wire.receipts import SERVING

METRIC = "metric"
"""The name of the deciding metric, next to the names of guardrails."""
SAME_SHARE = 1e-9


def _touches(name: str, answer: Capture, release: ReleaseConfig) -> bool:
    """Return whether an answer touches a guardrail that follows from the answer itself."""
    if name == "slow":
        return answer.first_s > release.slow_s
    if name == "broken_call":
        return answer.broken_calls > 0
    if name == "cut_off":
        return answer.finish == "length"
    return len(answer.tokens) // 4 > release.long_tokens


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


class OutcomeReader:
    """Computes outcomes from records, by the rules of one run.

    Example::

        reader = OutcomeReader(config.live)
        reader.read(records, decision, since=series.canary_since(), now=time.time())
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

    def read(
        self, records: LiveRecords, decision: Decision, *, since: float, now: float
    ) -> list[SettledAnswer]:
        """Returns the settled outcomes of the answers to users that the ``decision``'s canary
        assigned to an arm at random ``since`` its first decision, the earliest settled first; by
        unit of `ReleaseConfig`. An answer that another version than its arm's drew is left out: if
        that happens to one arm more than to the other, the sample ratio shows it.
        """
        if decision.candidate is None:
            return []
        versions = {
            CANDIDATE: decision.candidate.version,
            SERVING: decision.serving.version,
        }
        after_s, found = self._release.outcome_after_s, []
        for answer in records.answers.values():
            share = answer.propensity if answer.arm == CANDIDATE else 1 - answer.propensity
            if not 0 < share < 1 or not answer.user or answer.arm not in versions:
                continue
            if not since <= answer.at <= now - after_s:
                continue
            if any(version != versions[answer.arm] for version, _ in answer.spans):
                continue
            found.append((answer.at + after_s, answer.answer, share, answer))
        found.sort(key=lambda one: one[:2])
        outcomes, seen = [], set[str]()
        for settled, _, share, answer in found:
            first = answer.user not in seen
            seen.add(answer.user)
            if first or self._release.unit == "answer":
                values = self._values(answer, records)
                outcomes.append(SettledAnswer(settled, answer.arm, share, first, values))
        return outcomes

    def _values(self, answer: Capture, records: LiveRecords) -> dict[str, float]:
        until = answer.at + self._release.outcome_after_s
        reports = records.reports.get(answer.answer, {}).values()
        values = values_of(report for report in reports if report.received <= until)
        if self._release.metric == "reward":
            reward = self._rules.reward(values, answer, self._own)
            value = 0.0 if reward is None else reward
        else:
            value = values.get(self._release.metric, 0.0)
        found = {METRIC: self._scale.scaled(value)}
        for name in self._release.guardrails:
            if name == "silent":
                touched = not any(kind in values for kind in self._kinds)
            else:
                touched = _touches(name, answer, self._release)
            found[name] = float(touched)
        return found


Stages = dict[float, tuple[list[SettledAnswer], list[SettledAnswer]]]
"""The candidate's and the serving version's answers at each share."""


def by_share(outcomes: Iterable[SettledAnswer], shares: Iterable[float]) -> Stages:
    """Returns the outcomes of each stage: the candidate's and the serving version's."""
    stages: Stages = {share: ([], []) for share in shares}
    for outcome in outcomes:
        for share, arms in stages.items():
            if abs(share - outcome.share) < SAME_SHARE:
                arms[outcome.arm != CANDIDATE].append(outcome)
    return stages
