"""Outcomes: the values of a canary's users, or of its answers, scaled to 0 … 1.

An answer's outcome is what was reported within a fixed time after the request, and a user's outcome
is made of all answers to requests within a fixed time after the first. Both are the same for both
arms, whatever the arms take to answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deltawire.config.live import DEFAULT_REWARDS, LiveConfig
from deltawire.config.ranges import JUDGED, KNOWN_RANGES, LOWER_IS_BETTER, range_of
from deltawire.errors import InputError
from deltawire.live.capture.guardrails import OF_EVERY_ANSWER, SILENT, AnswerFacts, touches
from deltawire.live.learning.rewards import TERMS, OwnReward, RewardRules, values_of
from deltawire.wire.captures import ENDED_EARLY, FILTERED, NOT_STORED, Capture, Feedback
from deltawire.wire.decisions import CANDIDATE, HOLD_BACK, Decision
from deltawire.wire.receipts import SERVING

METRIC = "metric"
"""The name of the deciding metric, next to the names of guardrails."""
ROUNDING = 1e-9
CLIPPED_SHARE = 0.05
"""A range that more of the reported values lie outside of is not that of the kind."""


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
    """The worst and the best value of the deciding metric, which become 0 and 1."""

    worst: float
    best: float

    def scaled(self, value: float) -> float:
        """Returns the value on the scale; values outside count as its ends."""
        return min(max((value - self.worst) / (self.best - self.worst), 0.0), 1.0)

    def holds(self, value: float) -> bool:
        """Returns whether a value lies on the scale."""
        low, high = sorted((self.worst, self.best))
        return low - ROUNDING <= value <= high + ROUNDING


def scale_of(live: LiveConfig) -> OutcomeScale:
    """Returns the worst and the best value of a run's metric: those of its kind of feedback, or of
    the weighted sum over kinds, within the bounds of a reward. ``low`` and ``high`` replace them.

    Raises `InputError` if the range of a kind is unknown.
    """
    release, metric = live.release, live.release.metric
    if release.low is not None and release.high is not None:
        worst, best = release.low, release.high
        if metric in LOWER_IS_BETTER:
            worst, best = best, worst
        return OutcomeScale(worst, best)
    if metric != "reward":
        worst, best = range_of(live.ranges, metric)
        low = min(worst, best) if release.low is None else release.low
        high = max(worst, best) if release.high is None else release.high
        return OutcomeScale(low, high) if worst < best else OutcomeScale(high, low)
    low, high = reward_bounds(live)
    low = low if release.low is None else release.low
    high = high if release.high is None else release.high
    return OutcomeScale(low, high)


def reward_bounds(live: LiveConfig) -> tuple[float, float]:
    """Returns the least and the largest reward of an answer, within −1 … 1: of the kinds each may
    be reported or not, and silence has its own reward."""
    if live.reward_function:
        return -1.0, 1.0
    reported, terms = [0.0, 0.0], [0.0, 0.0]
    for kind, weight in (live.rewards or DEFAULT_REWARDS).items():
        ends = [weight * end for end in range_of(live.ranges, kind)]
        total = terms if kind in TERMS else reported
        total[0] += min(0.0, *ends)
        total[1] += max(0.0, *ends)
    silent = live.silent or 0.0
    low = min(reported[0], silent) + terms[0]
    high = max(reported[1], silent) + terms[1]
    low, high = max(low, -1.0), min(high, 1.0)
    if low >= high:
        raise InputError("all answers have the same reward", hint="weigh a kind in live.rewards")
    return low, high


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
        # A judge breaks no silence, unless only judges are asked.
        of_users = {kind for kind in self._kinds if not kind.startswith(JUDGED)}
        self._of_users = of_users or self._kinds
        self._ranges = {
            kind: sorted(live.ranges.get(kind) or KNOWN_RANGES[kind])
            for kind in self._kinds
            if kind in live.ranges or kind in KNOWN_RANGES
        }
        self.reported: Counter[str] = Counter()
        self.clipped: Counter[str] = Counter()
        """How many values of each kind lay outside its range, of those ``reported``."""

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
        metric, and the largest value of each guardrail. A guardrail that needs the text of answers
        has no value if the user of the first one, the earliest, did not agree to its storing: that
        was so before an arm answered, so it leaves out both arms' users alike. An answer that its
        arm could not give has the worst metric, however satisfied its user was with another
        version's."""
        rows = []
        for answer, reports in answers:
            row = self.values(answer, reports)
            mine = drawn_by_its_arm(answer, decision)
            if "error" in row and (answer.retried or not mine):
                row["error"] = 1.0
            if not mine:
                row[METRIC] = 0.0
            rows.append(row)
        found = {name: max(row[name] for row in rows if name in row) for name in rows[0]}
        return found | {METRIC: math.fsum(row[METRIC] for row in rows) / len(rows)}

    @property
    def warning(self) -> str:
        """Says of which kinds more than `CLIPPED_SHARE` of the values lay outside their range;
        empty if there is none."""
        shares = {k: n / self.reported[k] for k, n in self.clipped.items() if self.reported[k]}
        found = [
            f"{share:.0%} of {kind}"
            for kind, share in sorted(shares.items())
            if share > CLIPPED_SHARE
        ]
        if not found:
            return ""
        return f"values outside their range count as its ends: {', '.join(found)}; see live.ranges"

    def _clipped(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns reported values within their ranges, and counts those that were not."""
        found = dict(values)
        for kind, (low, high) in self._ranges.items():
            if kind in found:
                self.reported[kind] += 1
                self.clipped[kind] += not low <= found[kind] <= high
                found[kind] = min(max(found[kind], low), high)
        return found

    def values(self, answer: Capture, reports: Iterable[Feedback]) -> dict[str, float]:
        """Returns the values of a settled answer: `METRIC`, and 1 for each guardrail that it
        touched. An answer that ended early has the worst metric. One whose user did not agree to
        its storing has no value for the guardrails that need its text or tokens. Where they cannot
        be known for another reason, which may be the version's, they count as touched."""
        until = answer.asked_at + self._release.outcome_after_s
        values = values_of(report for report in reports if report.received <= until)
        reported = bool(values.keys() & self._kinds)
        values = self._clipped(values)
        if self._release.metric == "reward":
            reward = self._rules.reward(values, answer, self._own)
            value = 0.0 if reward is None else reward
        else:
            value = values.get(self._release.metric, 0.0)
        if reported:
            self.reported[METRIC] += 1
            self.clipped[METRIC] += not self._scale.holds(value)
        # Not silence: the user got no answer.
        early = answer.finish in ENDED_EARLY or answer.finish == FILTERED
        found = {METRIC: 0.0 if early else self._scale.scaled(value)}
        facts = AnswerFacts.of(answer)
        for name in self._release.guardrails:
            if answer.unusable == NOT_STORED and name not in OF_EVERY_ANSWER:
                continue
            unknown = answer.judged_only and name not in OF_EVERY_ANSWER
            unknown |= name == "long" and facts.tokens is None
            touched = unknown or touches(name, facts, self._release)
            if name == SILENT:
                touched = not any(kind in values for kind in self._of_users)
            found[name] = float(touched)
        return found


def drawn_by_its_arm(answer: Capture, decision: Decision) -> bool:
    """Returns whether the version of its arm drew some of an answer, as far as versions are stated:
    where it does not, another replica answered for one that could not."""
    arms = {CANDIDATE: decision.candidate, HOLD_BACK: decision.hold_back}
    arm = arms.get(answer.arm, decision.serving)
    if answer.upstream:
        return arm is not None and arm.upstream == answer.upstream
    drawn = {version for version, _ in answer.spans}
    return not drawn or (arm is not None and arm.version in drawn)
