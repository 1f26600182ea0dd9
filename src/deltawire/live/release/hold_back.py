"""The hold-back version: shows what many promotions have added up to.

A canary compares a candidate with the version before it, so a hundred candidates that are each a
little worse may all pass. With `live.release.hold_back` a small share of users keeps an old
version, and all versions since are compared with that one::

    promote 4      promote 9      promote 12
    ├── users of 4 ┼── users of 9 ┼── users of 12 ──▶  each against users of 0 at that time
    └───────────── users of 0, drawn again at each promotion ────────────────────────▶

Each user who settles is one payoff, as in a canary, with z = 1 for the serving version and a share
of 1 − `hold_back`. Users are drawn again for each version that serves, and count once for it, so
the draw is independent of all that was seen before.

A bettor against "no version since is worse than the hold-back version" deposits a part of its
capital at the beginning of each version: w_j = 1 / ((j + 1) (j + 2)) of it for the j-th, which add
up to 1. If no version is worse, the expected wealth is at most the sum of the deposits, so it
reaches 1/α with probability α at most, however many promotions there are (Ville's inequality). The
late deposits are there because a decay may begin late: what was deposited earlier has shrunk by
then. Guardrails are tested in the same way, "their rate rose by no more than the tolerance".

The wealth at the beginning of a version stands in the decision by which it serves, so that any
process can go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.config.release import ReleaseConfig
from deltawire.live.release.outcomes import METRIC, SettledAnswer
from deltawire.live.release.sequential_tests import BETS, ArrivalDifference, log_threshold
from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.decisions import DECAYED, RESTORES, Decision, ServedVersion
from deltawire.wire.receipts import SERVING

Array = NDArray[np.float64]

PLACE = "hold_back_place"
"""The figure of a decision by which another version serves: its number since the comparison
began."""
PLANNED_USERS = 1000
"""The interval is narrowest at about so many users."""
CONFIDENCE = 0.95


def deposit(place: int) -> float:
    """Returns the part of the capital that is deposited at the ``place``-th version, from 0."""
    return 1 / ((place + 1) * (place + 2))


@dataclass(frozen=True)
class HoldBackPeriod:
    """One version that serves while some users keep another: its ``place`` since the comparison
    began, and the wealth at its beginning by test, float64[bets]."""

    since: float
    serving: ServedVersion
    held: ServedVersion
    share: float
    place: int
    log_wealth: Mapping[str, Array]


@dataclass(frozen=True)
class HoldBackEvidence:
    """The state of the comparison: ``counts`` are the users of the version that serves and of the
    hold-back version, ``means`` their metrics. ``difference`` is serving less hold-back, with an
    interval of `CONFIDENCE` that holds at every look.

    ``worse`` names the tests that show that versions since are worse. ``better`` says that the one
    that serves is better.
    """

    held: ServedVersion
    share: float
    counts: tuple[int, int]
    means: tuple[float, float]
    difference: float
    low: float
    high: float
    log_evidence: float
    log_threshold: float
    worse: tuple[str, ...]
    better: bool
    place: int
    log_wealth: Mapping[str, Array]

    def figures(self) -> dict[str, float]:
        """Returns the figures that a decision records."""
        return {
            "hold_back_version": float(self.held.version),
            "hold_back_users": float(self.counts[1]),
            "hold_back_metric": self.means[1],
            "hold_back_serving_metric": self.means[0],
            "hold_back_difference": self.difference,
            "hold_back_low": self.low,
            "hold_back_high": self.high,
            "log_evidence_decay": self.log_evidence,
        }

    def carried(self) -> dict[str, float]:
        """Returns the figures from which the comparison goes on with the next version."""
        found = {PLACE: float(self.place + 1)}
        for name, wealth in self.log_wealth.items():
            begun = np.logaddexp(wealth, math.log(deposit(self.place + 1)))
            found |= {_figure(name, bet): float(one) for bet, one in enumerate(begun)}
        return found


def _figure(name: str, bet: int) -> str:
    return f"hold_back_wealth_{name}_{bet}"


def period_of(log: DecisionLog, release: ReleaseConfig) -> HoldBackPeriod | None:
    """Returns the comparison that the newest decision continues; None without a hold-back
    version."""
    newest = log.newest
    if newest is None or newest.held_back is None or newest.hold_back is None:
        return None
    begun = newest
    for one in reversed(log.decisions):
        if one.serving != newest.serving or one.held_back != newest.held_back:
            break
        begun = one
    names = [METRIC, *map(str, release.guardrails)]
    place, wealth = 0, {name: np.full(BETS, math.log(deposit(0))) for name in names}
    figures = _beginning(log, newest.serving).evidence
    if PLACE in figures:
        place = int(figures[PLACE])
        late = np.full(BETS, math.log(deposit(place)))  # A test that was not there before.
        wealth = {
            name: np.array([figures[_figure(name, bet)] for bet in range(BETS)])
            if all(_figure(name, bet) in figures for bet in range(BETS))
            else late
            for name in names
        }
    return HoldBackPeriod(
        begun.at, newest.serving, newest.hold_back, newest.hold_back_share, place, wealth
    )


def _beginning(log: DecisionLog, serving: ServedVersion) -> Decision:
    """Returns the decision since which a version serves."""
    found = log.decisions[-1]
    for one in reversed(log.decisions):
        if one.serving != serving:
            break
        found = one
    return found


class HoldBackTests:
    """The tests of one period. Users are added in the order in which they asked.

    Example::

        tests = HoldBackTests(release, period)
        tests.add(outcomes)
        tests.evidence().worse
    """

    def __init__(self, release: ReleaseConfig, period: HoldBackPeriod) -> None:
        self._period = period
        self._level = release.error_rate
        tolerances = {METRIC: 0.0, **{str(k): v for k, v in release.guardrails.items()}}
        self._worse = {}
        for name, most in tolerances.items():
            # The metric is worse if it fell, a guardrail if its rate rose.
            test = ArrivalDifference(tolerance=most, sign=-1 if name == METRIC else 1)
            test.log_wealth = np.array(period.log_wealth[name])
            self._worse[name] = test
        self._better = ArrivalDifference(tolerance=0.0)
        self._counts = np.zeros(2)
        self._sums = np.zeros((2, 2))

    def add(self, outcomes: Iterable[SettledAnswer]) -> None:
        """Adds users of the serving and of the hold-back version."""
        users = list(outcomes)
        if not users:
            return
        for name, tests in {
            **{name: [test] for name, test in self._worse.items()},
            METRIC: [self._worse[METRIC], self._better],
        }.items():
            known = [one for one in users if name in one.values]
            if not known:
                continue
            serving = np.array([float(one.arm == SERVING) for one in known])
            values = np.array([one.values[name] for one in known])
            shares = np.array([one.share for one in known])
            for test in tests:
                test.add(serving, values, shares)
        for one in users:
            arm, value = int(one.arm != SERVING), one.values[METRIC]
            self._counts[arm] += 1
            self._sums[arm] += value, value * value

    def evidence(self) -> HoldBackEvidence:
        """Returns what users showed so far."""
        period, guardrails = self._period, len(self._worse) - 1
        levels = dict.fromkeys(self._worse, self._level / 2 / max(guardrails, 1))
        levels[METRIC] = self._level / 2 if guardrails else self._level
        thresholds = {name: log_threshold(level) for name, level in levels.items()}
        found = {name: float(test.log_evidence) for name, test in self._worse.items()}
        better = log_threshold(self._level * deposit(period.place))
        counts = np.maximum(self._counts, 1)
        means = self._sums[:, 0] / counts
        difference, width = float(means[0] - means[1]), self._width(means)
        return HoldBackEvidence(
            held=period.held,
            share=period.share,
            counts=(int(self._counts[0]), int(self._counts[1])),
            means=(float(means[0]), float(means[1])),
            difference=difference if self._counts.all() else 0.0,
            low=max(difference - width, -1.0),
            high=min(difference + width, 1.0),
            log_evidence=found[METRIC],
            log_threshold=thresholds[METRIC],
            worse=tuple(name for name, one in found.items() if one >= thresholds[name]),
            better=float(self._better.log_evidence) >= better,
            place=period.place,
            log_wealth={name: test.log_wealth for name, test in self._worse.items()},
        )

    def _width(self, means: Array) -> float:
        """Returns half of the interval's width: an asymptotic confidence sequence (Waudby-Smith et
        al. 2024, "Time-uniform central limit theory and asymptotic confidence sequences")."""
        if (self._counts < 2).any():
            return 1.0
        spread = np.maximum(self._sums[:, 1] / self._counts - means**2, 1e-4)
        users, level = float(self._counts.sum()), 1 - CONFIDENCE
        planned = -2 * math.log(level)
        rate = (planned + math.log(planned + 1)) / PLANNED_USERS
        mixed = users * rate + 1
        factor = 2 * mixed / (users * rate) * math.log(math.sqrt(mixed) / level)
        return math.sqrt(float((spread / self._counts).sum()) * factor)


def with_hold_back(
    log: DecisionLog, release: ReleaseConfig, decision: Decision, found: HoldBackEvidence | None
) -> Decision:
    """Returns a decision by tests with the hold-back version that follows from it.

    It is the version that served when the comparison began. A promotion moves it to the version
    before, once that one is shown to be better, so that users of the hold-back version do not miss
    what others have gained. A restored version takes the place of the one that it restores.
    """
    if not release.hold_back and decision.hold_back is None:
        return decision
    if not release.hold_back:
        return msgspec.structs.replace(decision, hold_back=None, hold_back_share=0.0)
    before = log.newest
    held = decision.serving if before is None else before.hold_back or before.serving
    figures = {} if found is None else found.figures()
    restores = RESTORES in decision.evidence
    if restores and held.digest == decision.serving.digest:
        held = decision.serving
    elif before is not None and decision.verdict == "promote" and not restores:
        held = before.serving if found is not None and found.better else held
    changed = before is not None and before.serving != decision.serving
    if changed and found is not None and DECAYED not in decision.evidence:
        figures |= found.carried()
    return msgspec.structs.replace(
        decision,
        hold_back=held,
        hold_back_share=release.hold_back,
        evidence={**decision.evidence, **figures},
    )
