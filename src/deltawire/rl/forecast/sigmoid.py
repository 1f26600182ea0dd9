"""Fits a sigmoid of compute against a measure, with a confidence band.

ScaleRL's form (arXiv 2510.13786)::

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B),        floor <= R0 <= A <= ceiling

A is the plateau, C_mid the compute at which half of the gain is made, B the steepness. ScaleRL
searches a grid of A and C_mid and reports the best point. A first half of a run seldom decides
between a low plateau that is near and a high one that is far, so here every point of a grid of
(C_mid, B, A) keeps a weight, with the best R0 for it, and each statement is a quantile over the
weighted grid. The weight of a point with the residuals e over n measurements is::

    (n s^2 + sum(d^2))^(-n / 2) · prior(B),      d_t = e_t - r e_(t-1),  d_1 = sqrt(1 - r^2) e_1

which is the likelihood of residuals that follow one another, e_t = r e_(t-1) + noise, with normal
noise of unknown variance, of at least s^2: a run lies above or below its curve for some time, so
its measurements are not independent (Cochrane and Orcutt 1949; the first one as in Prais and
Winsten 1954). r is the correlation of the best curve's neighboring residuals. The prior of log B is
normal around log 1.5 with a deviation of 0.6; those of A and log C_mid are flat on the grid.

Runs often rise faster at first than the sigmoid that describes the rest; ScaleRL leaves out the
first part. Here half of the weight belongs to a fit in which all measurements count alike, and
half to one in which the d_t of the first fifth count a tenth: a run that has flattened since must
still show where it rose.

A first half decides less than earlier runs of the same kind do. With `CurvePrior`, each point of
the grid is also weighed by a normal distribution of (log C_mid, log B, A) over runs: an empirical
Bayes prior with the mean of the n earlier runs, and a covariance shrunk towards Λ₀ as if by three
more runs::

    Σ = (1 + 1/n) · (Σ_i (m_i - m)(m_i - m)ᵀ + Σ_i W_i + 3 Λ₀) / (n + 3)

m_i and W_i are the mean and the covariance of the weighted grid of run i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError

MIN_POINTS = 5
"""One more than the form has parameters."""
CONFIDENCE = 0.9
"""The share of the weight that lies between the ends of each interval."""

_MIDPOINTS = np.geomspace(0.01, 30.0, 49)
"""As multiples of the compute of the last measurement."""
_STEEPNESS = np.geomspace(0.4, 8.0, 21)
_PLATEAUS = 81
_EARLY = 0.2
_EARLY_COUNTS = 0.1
"""The share of the measurements that count less in one of the two fits, and how much."""
_MOST_CORRELATED = 0.95
_LEAST_NOISE = 5e-3
"""The least standard deviation of the noise, as a share of the range from floor to ceiling: less
than the distance of two plateaus in the grid, so that exact measurements leave several.
"""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A median, and the ends of its confidence interval.

    Example::

        Interval(0.71, 0.68, 0.75).median
    """

    median: float
    low: float
    high: float


_SPREAD = np.diag([0.7, 0.4, 0.15]) ** 2
"""Λ₀, the covariance of log C_mid, log B and A (as a share of the range) that is expected of runs
of one kind before any was seen."""
_SPREAD_COUNTS = 3
"""So many runs' worth."""


@dataclass(frozen=True)
class CurvePrior:
    """A normal distribution over (log C_mid, log B, A) of runs of one kind, from ``runs`` of them.

    C_mid is in the unit of compute, A in that of the measure.

    Example::

        prior = CurvePrior.of([fit_of_an_earlier_run, fit_of_another])
        fit = SigmoidFit(compute, values, floor=0, ceiling=1, prior=prior)
    """

    mean: Floats
    covariance: Floats
    runs: int

    @classmethod
    def of(cls, fits: Sequence[SigmoidFit]) -> CurvePrior:
        """The prior that finished runs give; raises `InputError` without any."""
        if not fits:
            raise InputError("a prior needs at least one earlier run")
        count = len(fits)
        means = np.array([fit.moments[0] for fit in fits])
        middle = means.mean(0)
        sums = (means - middle).T @ (means - middle) + sum(fit.moments[1] for fit in fits)
        range_ = np.array([1.0, 1.0, fits[0].scale])
        expected = _SPREAD_COUNTS * _SPREAD * np.outer(range_, range_)
        covariance = (1 + 1 / count) * (sums + expected) / (count + _SPREAD_COUNTS)
        return cls(middle, covariance, count)

    def log_weight(self, parameters_K3: Floats) -> Floats:
        """The logarithm of the density of each row, up to a constant: float64[K]."""
        off = parameters_K3 - self.mean
        found: Floats = -0.5 * np.einsum("ki,ki->k", off @ np.linalg.inv(self.covariance), off)
        return found


@dataclass(frozen=True)
class _Weighted:
    """Points of the grid with their weights, which sum to 1: the number of the shape, R0 and A."""

    shape: NDArray[np.intp]
    start: Floats
    plateau: Floats
    weight: Floats


class SigmoidFit:
    """The weighted grid of sigmoids that explain some measurements.

    ``compute`` has n values that rise and are at least 0, in any unit; ``values`` are the n
    measurements, between ``floor`` and ``ceiling``; ``noise`` is the least standard deviation of
    one of them; ``prior`` is what earlier runs say. Raises `InputError` for fewer than `MIN_POINTS`
    measurements, for compute that does not rise, and for values that are not finite.

    Example::

        fit = SigmoidFit([0, 1, 2, 3, 4], [0.2, 0.3, 0.38, 0.43, 0.47], floor=0, ceiling=1)
        fit.gain(2.0).median
    """

    def __init__(
        self,
        compute: Sequence[float],
        values: Sequence[float],
        *,
        floor: float,
        ceiling: float,
        noise: float = 0.0,
        prior: CurvePrior | None = None,
    ) -> None:
        at, seen = np.asarray(compute, np.float64), np.asarray(values, np.float64)
        _check(at, seen, floor, ceiling)
        self.last = float(at[-1])
        """The compute of the last measurement."""
        self._prior = prior
        self.scale, self._floor = ceiling - floor, floor
        """The range of the measure."""
        self._least = max(noise, _LEAST_NOISE * self.scale) ** 2
        self._middles_S, self._steepness_S = (
            grid.ravel() for grid in np.meshgrid(_MIDPOINTS, _STEEPNESS, indexing="ij")
        )
        counts_N = np.ones(len(at))
        whole = self._fit(at, seen, counts_N)
        counts_N[: int(_EARLY * len(at))] = _EARLY_COUNTS
        fits = [whole, self._fit(at, seen, counts_N)]
        self._shape = np.concatenate([fit.shape for fit in fits])
        self._weight = np.concatenate([fit.weight for fit in fits]) / len(fits)
        self._start = np.concatenate([fit.start for fit in fits])
        self._plateau = np.concatenate([fit.plateau for fit in fits])
        best = int(np.argmax(whole.weight))
        shape = whole.shape[best]
        residuals = seen - self._values(self._share(at))[best]
        self.residual = float(np.sqrt(np.mean(residuals**2)))
        """Root of the mean squared residual of the best curve."""
        self.best = {
            "start": float(self._start[best]),
            "plateau": float(self._plateau[best]),
            "midpoint": float(self._middles_S[shape] * self.last),
            "steepness": float(self._steepness_S[shape]),
        }
        """The parameters with the largest weight for all measurements: R0, A, C_mid (in units of
        compute) and B."""

    def _fit(self, at: Floats, seen: Floats, counts_N: Floats) -> _Weighted:
        """Weighs the grid by measurements, each of which counts so much."""
        plateaus_A = self._floor + self.scale * np.linspace(0, 1, _PLATEAUS)
        share_SN, count, counted_N = self._share(at), len(at), counts_N**0.5

        def squares(correlation: float) -> tuple[Floats, Floats]:
            rest, share, values = (
                _innovations(one, correlation) * counted_N for one in (1 - share_SN, share_SN, seen)
            )
            return _best_starts(rest, share, values, plateaus_A, self._floor)

        start_SA, squares_SA = squares(0.0)
        shape, place = np.unravel_index(np.argmin(squares_SA), squares_SA.shape)
        start, share_N = start_SA[shape, place], share_SN[shape]
        residual_N = seen - start * (1 - share_N) - plateaus_A[place] * share_N
        start_SA, squares_SA = squares(_correlation(residual_N * counted_N))
        log_SA = np.log(count * self._least + squares_SA)
        log_SA *= -0.5 * count
        log_SA -= 0.5 * (np.log(self._steepness_S / 1.5) / 0.6)[:, None] ** 2
        if self._prior is not None:
            log_SA += self._prior_weights(plateaus_A)
        weight_SA = np.exp(log_SA - log_SA.max())
        # Few points of the grid carry all the weight; the others are left out of every quantile.
        kept = weight_SA > 1e-6
        shapes, places = np.nonzero(kept)
        weight = weight_SA[kept] / weight_SA[kept].sum()
        return _Weighted(shapes, start_SA[kept], plateaus_A[places], weight)

    def _prior_weights(self, plateaus_A: Floats) -> Floats:
        """The logarithm of the prior at each point of the grid."""
        assert self._prior is not None
        points_K = self._parameters(
            np.repeat(np.arange(len(self._middles_S)), len(plateaus_A)),
            np.tile(plateaus_A, len(self._middles_S)),
        )
        return self._prior.log_weight(points_K).reshape(-1, len(plateaus_A))

    def _parameters(self, shapes_K: NDArray[np.intp], plateaus_K: Floats) -> Floats:
        """(log C_mid, log B, A) of points of the grid, float64[K, 3]."""
        middles_K = np.log(self._middles_S[shapes_K] * self.last)
        return np.stack([middles_K, np.log(self._steepness_S[shapes_K]), plateaus_K], 1)

    @property
    def moments(self) -> tuple[Floats, Floats]:
        """The mean and the covariance of (log C_mid, log B, A) over the weighted grid."""
        points_K3 = self._parameters(self._shape, self._plateau)
        mean = self._weight @ points_K3
        off = points_K3 - mean
        return mean, (off * self._weight[:, None]).T @ off

    def at(self, compute: float) -> Interval:
        """Returns the measure at a compute, as the curve without noise."""
        return self._interval(self._values(self._share(np.array([compute])))[:, 0])

    def gain(self, factor: float) -> Interval:
        """Returns the gain from ``factor`` times the compute of the last measurement."""
        now_later = self._values(self._share(np.array([self.last, factor * self.last])))
        return self._interval(now_later[:, 1] - now_later[:, 0])

    @property
    def plateau(self) -> Interval:
        """The measure after any amount of compute."""
        return self._interval(self._plateau)

    def _share(self, compute: Floats) -> Floats:
        """The part of the way from R0 to A, by shape and compute; 0 without compute."""
        relative = compute / self.last
        with np.errstate(divide="ignore", over="ignore"):
            ratio = self._middles_S[:, None] / relative[None, :]
            found: Floats = 1.0 / (1.0 + ratio ** self._steepness_S[:, None])
        return found

    def _values(self, share_SN: Floats) -> Floats:
        """The curve of each kept point of the grid, from the shares of all shapes."""
        share = share_SN[self._shape]
        found: Floats = self._start[:, None] * (1 - share) + self._plateau[:, None] * share
        return found

    def _interval(self, values: Floats) -> Interval:
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(self._weight[order])
        edge = (1 - CONFIDENCE) / 2
        places = np.searchsorted(reached, [0.5, edge, 1 - edge]).clip(max=len(values) - 1)
        median, low, high = (float(values[order[place]]) for place in places)
        return Interval(median, low, high)


def _correlation(residual_N: Floats) -> float:
    """The correlation of neighboring residuals, from 0 to `_MOST_CORRELATED`."""
    squares = float(residual_N @ residual_N)
    if squares <= 0:
        return 0.0
    return min(max(0.0, float(residual_N[1:] @ residual_N[:-1]) / squares), _MOST_CORRELATED)


def _innovations(values_XN: Floats, correlation: float) -> Floats:
    """The part of each value along the last axis that the one before it does not foresee."""
    found = values_XN.copy()
    found[..., 1:] -= correlation * values_XN[..., :-1]
    found[..., 0] *= (1 - correlation**2) ** 0.5
    return found


def _best_starts(
    rest_SN: Floats, share_SN: Floats, seen_N: Floats, plateaus_A: Floats, floor: float
) -> tuple[Floats, Floats]:
    """The best R0 in [floor, A] for each shape and plateau, and the sum of squared residuals.

    A curve is R0 times the rest plus A times the share."""
    uu, us, ss = ((x * y).sum(1) for x, y in ((rest_SN,) * 2, (rest_SN, share_SN), (share_SN,) * 2))
    uy, sy, yy = rest_SN @ seen_N, share_SN @ seen_N, float(seen_N @ seen_N)
    with np.errstate(divide="ignore", invalid="ignore"):
        start = (uy[:, None] - us[:, None] * plateaus_A) / uu[:, None]
    start = np.clip(np.nan_to_num(start, nan=floor), floor, plateaus_A)
    squares = (
        yy
        - 2 * plateaus_A * sy[:, None]
        - 2 * start * uy[:, None]
        + plateaus_A**2 * ss[:, None]
        + 2 * plateaus_A * start * us[:, None]
        + start**2 * uu[:, None]
    )
    return start, np.maximum(squares, 0.0)


def _check(at: Floats, seen: Floats, floor: float, ceiling: float) -> None:
    if len(at) != len(seen):
        raise InputError(f"{len(at)} amounts of compute and {len(seen)} values differ in number")
    if len(at) < MIN_POINTS:
        raise InputError(
            f"a forecast needs {MIN_POINTS} measurements, one more than the sigmoid has "
            f"parameters; there are {len(at)}",
            hint="wait for more, or evaluate more often (evaluate.every)",
        )
    if not (np.isfinite(at).all() and np.isfinite(seen).all()):
        raise InputError("a measurement is not a finite number")
    if at[0] < 0 or (np.diff(at) <= 0).any():
        raise InputError("the compute of the measurements does not rise")
    if not floor < ceiling or seen.min() < floor or seen.max() > ceiling:
        raise InputError(f"a measurement lies outside of [{floor:g}, {ceiling:g}]")
