"""Forecasts a run: its curve of compute against a measure, the plateau, and the next doubling.

The compute of a version is the number of tokens that were sampled for it and for all versions
before, with those of groups that were dropped as too old, plus the tokens that were trained on;
or the seconds of its steps; or its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import numpy as np

from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.events import Evaluated, Event, Step
from deltawire.rl.forecast.sigmoid import MIN_POINTS, CurvePrior, Interval, SigmoidFit

Measure = Literal["accuracy", "greedy", "area", "reward"]
"""Held-out accuracy of sampled or greedy answers, the area under accuracy over thinking budgets,
or the mean reward of the groups of each step."""
Unit = Literal["tokens", "seconds", "versions"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
UNITS: tuple[Unit, ...] = get_args(Unit)

MAX_BINS = 40
"""Steps are many and noisy: their rewards are averaged in at most so many bins of equal compute."""
BAND_POINTS = 41


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A median with the ends of its 90 % interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Interval) -> Range:
        """Copies an interval."""
        return cls(median=found.median, low=found.low, high=found.high)


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement: compute spent up to ``version``, and the value."""

    version: int
    compute: float
    value: float


class BandPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted curve at a compute."""

    compute: float
    value: Range


class Backtest(msgspec.Struct, frozen=True, kw_only=True):
    """The first half of the compute, fitted and compared with the second: the median absolute error
    of the forecast and of carrying the last value forward, over ``points`` measurements, and the
    gain of the last value over the last fitted one."""

    error: float
    carried_error: float
    points: int
    gain: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The plateau of a run's curve, and the gain from more compute.

    ``plateau`` is the value after any amount of compute, ``doubled`` after twice as much as was
    spent, ``gain`` the difference between that and now; ``reached`` the share of the way from the
    start to the plateau. ``start``, ``midpoint`` and ``steepness`` are R0, C_mid and B of the best
    curve, ``residual`` its root mean squared error. ``falling`` is true if the newest measurements
    lie below what those before them forecast: the form cannot describe a fall. ``backtest``
    is None with too few points. ``like`` counts the earlier runs whose curves were a prior.
    """

    measure: Measure
    unit: Unit
    version: int
    compute: float
    points: int
    value: float
    now: Range
    plateau: Range
    doubled: Range
    gain: Range
    reached: float
    start: float
    midpoint: float
    steepness: float
    residual: float
    falling: bool
    backtest: Backtest | None
    band: list[BandPoint]
    curve: list[CurvePoint]
    like: int = 0


@dataclass(frozen=True)
class Curve:
    """Measurements of one run in order, and what bounds them.

    Example::

        curve = read_curve(events, config, measure="accuracy", unit="tokens")
        forecast_of(curve).gain.high
    """

    measure: Measure
    unit: Unit
    points: tuple[CurvePoint, ...]
    floor: float
    ceiling: float
    noise: float

    def fit(self, first: int | None = None, *, prior: CurvePrior | None = None) -> SigmoidFit:
        """Fits all measurements, or the ``first`` ones; raises `InputError` for too few."""
        points = self.points[:first]
        return SigmoidFit(
            [one.compute for one in points],
            [one.value for one in points],
            floor=self.floor,
            ceiling=self.ceiling,
            noise=self.noise,
            prior=prior,
        )


def prior_of(curves: Sequence[Curve]) -> CurvePrior | None:
    """Returns what earlier runs of one kind say of the next one, None without any.

    Raises `InputError` if one has too few measurements.
    """
    return CurvePrior.of([curve.fit() for curve in curves]) if curves else None


def read_curve(
    events: Iterable[Event],
    config: RunConfig,
    *,
    measure: Measure,
    unit: Unit,
    first: int = 0,
) -> Curve:
    """Makes the curve of a run from its events, from version ``first`` on.

    Raises `InputError` if the run has no such measurement.
    """
    steps: dict[int, Step] = {}
    evaluated: dict[int, Evaluated] = {}
    for event in events:
        if isinstance(event, Step):
            _keep_newest(steps, event)
        elif isinstance(event, Evaluated):
            _keep_newest(evaluated, event)
    spent = _spent(steps, unit)
    if measure == "reward":
        values = {version: step.reward_mean for version, step in steps.items()}
        problems = 0
    else:
        values = {
            version: value
            for version, one in evaluated.items()
            if (value := getattr(one, measure)) is not None
        }
        problems = min((one.problems for one in evaluated.values()), default=0)
    points = [
        CurvePoint(version=version, compute=spent[version], value=float(values[version]))
        for version in sorted(values)
        if version >= first and version in spent
    ]
    if not points:
        raise InputError(
            f"the run has no {measure} to forecast",
            hint="set evaluate.every, or use --of reward"
            if measure != "area"
            else "set evaluate.budgets, or use --of accuracy",
        )
    if measure == "reward":
        points = _binned(points)
    return _bounded(measure, unit, points, config, problems)


def forecast_of(curve: Curve, prior: CurvePrior | None = None) -> Forecast:
    """Fits a curve and states what more compute would buy; raises `InputError` for too few
    measurements."""
    fit = curve.fit(prior=prior)
    last = curve.points[-1]
    start = fit.best["start"]
    now, plateau = Range.of(fit.at(last.compute)), Range.of(fit.plateau)
    way = plateau.median - start
    reach = np.linspace(0.0, 2.0 * last.compute, BAND_POINTS)
    return Forecast(
        measure=curve.measure,
        unit=curve.unit,
        version=last.version,
        compute=last.compute,
        points=len(curve.points),
        value=last.value,
        now=now,
        plateau=plateau,
        doubled=Range.of(fit.at(2 * last.compute)),
        gain=Range.of(fit.gain(2.0)),
        reached=min(max((now.median - start) / way, 0.0), 1.0) if way > 0 else 1.0,
        start=start,
        midpoint=fit.best["midpoint"],
        steepness=fit.best["steepness"],
        residual=fit.residual,
        falling=_is_falling(curve),
        backtest=backtest_of(curve, prior),
        like=0 if prior is None else prior.runs,
        band=[BandPoint(compute=float(at), value=Range.of(fit.at(float(at)))) for at in reach],
        curve=list(curve.points),
    )


def backtest_of(curve: Curve, prior: CurvePrior | None = None) -> Backtest | None:
    """Fits the first half of the compute and scores the second; None with too few measurements."""
    half = curve.points[-1].compute / 2
    fitted = sum(one.compute <= half for one in curve.points)
    later = curve.points[fitted:]
    if fitted < MIN_POINTS or not later:
        return None
    fit, carried = curve.fit(fitted, prior=prior), curve.points[fitted - 1].value
    values = np.array([one.value for one in later])
    forecast = np.array([fit.at(one.compute).median for one in later])
    return Backtest(
        error=float(np.median(np.abs(forecast - values))),
        carried_error=float(np.median(np.abs(carried - values))),
        points=len(later),
        gain=later[-1].value - carried,
    )


def _spent(steps: dict[int, Step], unit: Unit) -> dict[int, float]:
    """The compute up to each version; a step whose event was lost costs the mean of the others."""
    if unit == "versions":
        return {version: float(version) for version in range(max(steps, default=0) + 1)}
    costs = {version: _cost(step, unit) for version, step in steps.items()}
    mean = sum(costs.values()) / len(costs) if costs else 0.0
    spent, total = {0: 0.0}, 0.0
    for version in range(1, max(costs, default=0) + 1):
        total += costs.get(version, mean)
        spent[version] = total
    return spent


def _cost(step: Step, unit: Unit) -> float:
    if unit == "seconds":
        return step.seconds
    counts = step.families.values()
    sampled = sum(one.trained_tokens + one.dropped_tokens for one in counts)
    return float(max(sampled, step.tokens) + step.tokens)


def _binned(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Averages measurements in at most `MAX_BINS` bins with about equally many each."""
    bins = np.array_split(np.arange(len(points)), min(MAX_BINS, len(points)))
    return [
        CurvePoint(
            version=points[bin_[-1]].version,
            compute=float(np.mean([points[place].compute for place in bin_])),
            value=float(np.mean([points[place].value for place in bin_])),
        )
        for bin_ in bins
    ]


def _bounded(
    measure: Measure,
    unit: Unit,
    points: Sequence[CurvePoint],
    config: RunConfig,
    problems: int,
) -> Curve:
    """Adds the bounds of the measure: shares lie in [0, 1]; rewards between 0 and the reward of a
    solved task, or a range beyond the rewards that were seen."""
    values = [one.value for one in points]
    if measure != "reward":
        mean = min(max(sum(values) / len(values), 0.05), 0.95)
        # Answers to one problem are alike, so only problems count as independent.
        noise = (mean * (1 - mean) / problems) ** 0.5 / 2 if problems else 0.0
        return Curve(measure, unit, tuple(points), 0.0, 1.0, noise)
    low, high = min(values), max(values)
    beyond = max(high - low, 1e-6)
    ceiling = config.probes.reward_scale
    ceiling = ceiling if high <= ceiling else high + beyond
    floor = 0.0 if low >= 0 else low - beyond
    return Curve(measure, unit, tuple(points), floor, ceiling, 0.0)


def _is_falling(curve: Curve) -> bool:
    """Returns whether the mean of the newest quarter lies below the interval that the measurements
    before it forecast, by two standard errors and by a hundredth of the range."""
    count = max(3, len(curve.points) // 4)
    before = len(curve.points) - count
    if before < MIN_POINTS:
        return False
    fit, newest = curve.fit(before), curve.points[before:]
    mean = sum(one.value - fit.at(one.compute).low for one in newest) / count
    error = max(fit.residual, curve.noise) / count**0.5
    return bool(mean < -max(2 * error, 0.01 * (curve.ceiling - curve.floor)))


def _keep_newest(kept: dict[int, Step] | dict[int, Evaluated], event: Step | Evaluated) -> None:
    """Keeps the later of two events: after a crash a version may be made or measured again."""
    before = kept.get(event.version)
    if before is None or event.at >= before.at:
        kept[event.version] = event  # type: ignore[assignment]
