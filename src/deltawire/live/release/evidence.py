"""Evidence: what all outcomes of a canary so far say, in one set of sequential tests.

The error rate α of a run is spent once, whatever the number of stages and looks:

- A false promotion is a rejection of "the candidate is worse by the margin", a test at α.
- A false rollback is a rejection of "the candidate is not worse" by the gate (a fifth of α, in
  equal parts for its sets), by users (two fifths), or, for one of k guardrails, of "its rate rose
  by no more than its tolerance" (two fifths, in k parts): at most α together. Without a gate the
  two others have half of α each; with a shadow, guardrails have half of their part on copies of
  requests.
- A sample-ratio mismatch (α/10) holds the canary: it neither promotes nor rolls back.
- The alarm that users do not see a held-out gain (α/10) decides nothing.

Stages need no share of α: each test continues over all stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deltawire.config.release import ReleaseConfig
from deltawire.errors import InputError
from deltawire.live.release.outcomes import METRIC, SettledAnswer
from deltawire.live.release.sequential_tests import (
    ArrivalDifference,
    AssignmentShare,
    log_threshold,
)
from deltawire.wire.decisions import CANDIDATE

SAME_SHARE = 1e-9
GATE_PARTS = 5
"""The evaluation gate has one of so many parts of the error rate."""
LEAST_EFFECT = 1e-6
"""The least sum of an effect and the margin for which outcomes are planned."""
GAP_ALARM = "gap_alarm"
"""The figure of a decision that is 1 if users do not see the held-out gain."""


@dataclass(frozen=True)
class ErrorBudget:
    """The error rate of each test."""

    promotion: float
    rollback: float
    guardrail: float
    sample_ratio: float
    shadow: float = 0.0
    gate: float = 0.0


def error_budget(release: ReleaseConfig) -> ErrorBudget:
    """Returns how the error rate is divided."""
    gate = release.error_rate / GATE_PARTS if release.gate else 0.0
    rest, guardrails = release.error_rate - gate, len(release.guardrails)
    half = rest / 2
    if release.shadow:  # Each guardrail is tested on copies too.
        guardrails *= 2
    return ErrorBudget(
        promotion=release.error_rate,
        rollback=half if guardrails else rest,
        guardrail=half / guardrails if guardrails else half,
        sample_ratio=release.error_rate / 10,
        shadow=half / guardrails if guardrails and release.shadow else 0.0,
        gate=gate / len(release.gate) if release.gate else 0.0,
    )


@dataclass(frozen=True)
class DifferenceFinding:
    """One test: the mean difference so far, candidate less serving, and the log of
    the evidence against its null hypothesis, which rejects from ``log_threshold`` on."""

    difference: float
    log_evidence: float
    log_threshold: float

    @property
    def rejects(self) -> bool:
        """Returns whether the null hypothesis is rejected."""
        return self.log_evidence >= self.log_threshold


class HeldoutAccuracy(NamedTuple):
    """Held-out accuracies of the candidate and of the serving version."""

    candidate: float
    serving: float

    @property
    def gain(self) -> float:
        """The candidate's less the serving version's."""
        return self.candidate - self.serving


@dataclass(frozen=True)
class SimulationGap:
    """Held-out accuracy less the live metric, of both versions; ``finding`` tests "users see the
    candidate's held-out gain, but for the tolerance"."""

    candidate: float
    serving: float
    finding: DifferenceFinding


@dataclass(frozen=True)
class Evidence:
    """The state of a canary's tests.

    ``counts`` are the outcomes of the candidate and of the serving version at each share.
    ``metric`` tests "worse by the margin", ``worse`` "not worse", and each guardrail has a test.
    ``log_sample_ratio`` is the log of the evidence that users were not assigned as stated.
    ``live`` are the mean metrics of the candidate and of the serving version, and ``gap`` compares
    them with held-out accuracies, where there are any.
    """

    counts: Mapping[float, tuple[int, int]]
    log_sample_ratio: float
    log_sample_ratio_threshold: float
    metric: DifferenceFinding
    worse: DifferenceFinding
    guardrails: Mapping[str, DifferenceFinding]
    live: tuple[float, float] = (0.0, 0.0)
    gap: SimulationGap | None = None

    @property
    def alarm(self) -> str:
        """Says that the held-out gain is not seen by users; empty if that is not shown."""
        if self.gap is None or not self.gap.finding.rejects:
            return ""
        return (
            "users do not see the gain on held-out tasks: held-out accuracy less the live metric "
            f"is {self.gap.candidate:.3f} for the candidate and {self.gap.serving:.3f} for the "
            "serving version"
        )

    @property
    def mismatched(self) -> bool:
        """Returns whether users were not assigned with the stated probabilities."""
        return self.log_sample_ratio >= self.log_sample_ratio_threshold

    def harmful(self) -> list[str]:
        """Returns the names of the tests that demand a rollback."""
        names = [name for name, one in self.guardrails.items() if one.rejects]
        return [METRIC, *names] if self.worse.rejects else names

    def figures(self) -> dict[str, float]:
        """Returns the figures that a decision records."""
        found = {
            "difference": self.metric.difference,
            "log_evidence_not_worse": self.metric.log_evidence,
            "log_evidence_worse": self.worse.log_evidence,
            "log_evidence_sample_ratio": self.log_sample_ratio,
            "outcomes_candidate": float(sum(one for one, _ in self.counts.values())),
            "outcomes_serving": float(sum(other for _, other in self.counts.values())),
            "live_candidate": self.live[0],
            "live_serving": self.live[1],
        }
        if self.gap is not None:
            found["gap_candidate"] = self.gap.candidate
            found["gap_serving"] = self.gap.serving
            found["log_evidence_gap"] = self.gap.finding.log_evidence
            found[GAP_ALARM] = float(self.gap.finding.rejects)
        for name, one in self.guardrails.items():
            found[f"difference_{name}"] = one.difference
            found[f"log_evidence_{name}"] = one.log_evidence
        return found


class _StageOutcomes:
    """The outcomes at one share: how many of each arm, and how many of them of new users."""

    def __init__(self) -> None:
        self.counts = [0, 0]
        self.first = [0, 0]


class CanaryTests:
    """The tests of one canary. Outcomes are added in the order in which their users asked, and none
    is kept.

    Example::

        tests = CanaryTests(release)
        tests.add(outcomes)
        tests.evidence().harmful()
    """

    def __init__(self, release: ReleaseConfig, heldout: HeldoutAccuracy | None = None) -> None:
        self._budget = error_budget(release)
        self._heldout = heldout
        self._gap: ArrivalDifference | None = None
        if heldout is not None and heldout.gain > release.gap:
            # Its null hypothesis: the live difference is at least the held-out gain less the gap.
            self._gap = ArrivalDifference(tolerance=release.gap - heldout.gain, sign=-1)
        self._totals = [0.0, 0.0]
        self._stages = {share: _StageOutcomes() for share in release.stages}
        self._metric = ArrivalDifference(tolerance=-release.margin)
        self._worse = ArrivalDifference(tolerance=0.0, sign=-1)
        self._guardrails = {
            str(name): ArrivalDifference(tolerance=most)
            for name, most in release.guardrails.items()
        }

    def add(self, outcomes: Iterable[SettledAnswer]) -> None:
        """Adds outcomes; those at a share that is no stage's are left out."""
        counted = []
        for outcome in outcomes:
            for share, stage in self._stages.items():
                if abs(share - outcome.share) < SAME_SHARE:
                    arm = int(outcome.arm != CANDIDATE)
                    stage.counts[arm] += 1
                    stage.first[arm] += outcome.first
                    self._totals[arm] += outcome.values[METRIC]
                    counted.append(outcome)
        if not counted:
            return
        watched = {METRIC: [self._metric, self._worse, *([self._gap] if self._gap else [])]}
        watched |= {name: [test] for name, test in self._guardrails.items()}
        for name, tests in watched.items():
            # Only users who refused before an arm answered have no value (`OutcomeRules.outcome`),
            # so those that are left are still assigned at random. A unit whose value a version may
            # hide must have one, or that version would be compared by its better answers.
            known = [one for one in counted if name in one.values]
            if not known:
                continue
            candidate = np.array([float(one.arm == CANDIDATE) for one in known])
            shares = np.array([one.share for one in known])
            values = np.array([one.values[name] for one in known])
            for test in tests:
                test.add(candidate, values, shares)

    def evidence(self) -> Evidence:
        """Returns what the outcomes so far say."""
        budget, users = self._budget, AssignmentShare()
        for share, stage in self._stages.items():
            users.add(candidates=stage.first[0], users=sum(stage.first), share=share)
        return Evidence(
            counts={share: (one.counts[0], one.counts[1]) for share, one in self._stages.items()},
            log_sample_ratio=users.log_evidence,
            log_sample_ratio_threshold=log_threshold(budget.sample_ratio),
            metric=_finding(self._metric, budget.promotion),
            worse=_finding(self._worse, budget.rollback),
            guardrails={
                name: _finding(test, budget.guardrail) for name, test in self._guardrails.items()
            },
            live=self._live(),
            gap=self._gap_found(),
        )

    def _live(self) -> tuple[float, float]:
        counts = [max(sum(s.counts[arm] for s in self._stages.values()), 1) for arm in (0, 1)]
        return self._totals[0] / counts[0], self._totals[1] / counts[1]

    def _gap_found(self) -> SimulationGap | None:
        """Return the gaps; None without held-out accuracies, or before both arms have outcomes."""
        seen = [sum(stage.counts[arm] for stage in self._stages.values()) for arm in (0, 1)]
        if self._heldout is None or not all(seen):
            return None
        live, threshold = self._live(), log_threshold(self._budget.sample_ratio)
        finding = DifferenceFinding(float(self._metric.mean), 0.0, threshold)
        if self._gap is not None:
            finding = _finding(self._gap, self._budget.sample_ratio)
        return SimulationGap(
            self._heldout.candidate - live[0], self._heldout.serving - live[1], finding
        )


def _finding(test: ArrivalDifference, error_rate: float) -> DifferenceFinding:
    evidence = float(test.log_evidence)
    return DifferenceFinding(float(test.mean), evidence, log_threshold(error_rate))


def planned_answers(
    release: ReleaseConfig, *, effect: float = 0.05, rate: float = 0.5
) -> list[int]:
    """Returns the outcomes of both arms that each stage needs, for a candidate that is better by
    ``effect`` where the serving version's mean outcome is ``rate``.

    Stages before the last end after `ReleaseConfig.stage_outcomes` of the candidate. In the last,
    the log of the wealth of the best bet grows by x/2 − z√x with probability 0.9, where z = 1.2816
    and x = n (effect + margin)² / V for n outcomes, of which each gives information 1/V with
    V = v/share + v/(1 − share) and v = rate (1 − rate). It must reach log(1/α) and the cost of
    holding a grid of bets, about log(4).

    Raises `InputError` if the effect and the margin together are too small to be shown.
    """
    if effect + release.margin < LEAST_EFFECT:
        raise InputError(
            f"an effect of {effect:g} cannot be shown with live.release.margin = "
            f"{release.margin:g}",
            hint=f"plan for an effect of {LEAST_EFFECT:g} or more",
        )
    wanted = log_threshold(release.error_rate) + math.log(4)
    x = (1.2816 + math.sqrt(1.2816**2 + 2 * wanted)) ** 2
    spread = max(rate * (1 - rate), 1e-4)
    *early, last = release.stages
    variance = spread / last + spread / (1 - last)
    needed = math.ceil(x * variance / (effect + release.margin) ** 2)
    stages = [math.ceil(release.stage_outcomes / share) for share in early]
    return [*stages, max(needed, math.ceil(release.stage_outcomes / last))]
