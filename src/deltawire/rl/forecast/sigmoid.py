"""Fits a sigmoid of compute against a measure, with a confidence band.

ScaleRL's form (arXiv 2510.13786)::

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B),        floor <= R0 <= A <= ceiling

A is the plateau, C_mid the compute at which half of the gain is made, B the steepness. ScaleRL
searches a grid of A and C_mid and reports the best point. A first half of a run seldom decides
between a low plateau that is near and a high one that is far, so here every point of a grid of
(C_mid, B, A) keeps a weight, with the best R0 for it, and each statement is a quantile over the
weighted grid. The weight of a point with the residuals e over n measurements is::

    (n s^2 + sum(e^2))^(-m / 2) · prior(B)

which is the likelihood of normal noise of unknown variance, of at least s^2, for m independent
measurements: n, less what the correlation of neighboring residuals takes away. The prior of log B
is normal around log 1.5 with a deviation of 0.6; those of A and log C_mid are flat on the grid.
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


class SigmoidFit:
    """The weighted grid of sigmoids that explain some measurements.

    ``compute`` has n values that rise and are at least 0, in any unit; ``values`` are the n
    measurements, between ``floor`` and ``ceiling``; ``noise`` is the least standard deviation of
    one of them. Raises `InputError` for fewer than `MIN_POINTS` measurements, for compute that does
    not rise, and for values that are not finite.

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
    ) -> None:
        at, seen = np.asarray(compute, np.float64), np.asarray(values, np.float64)
        _check(at, seen, floor, ceiling)
        self.last = float(at[-1])
        """The compute of the last measurement."""
        scale = ceiling - floor
        plateaus_A = floor + scale * np.linspace(0, 1, _PLATEAUS)
        middles_S, steepness_S = (
            grid.ravel() for grid in np.meshgrid(_MIDPOINTS, _STEEPNESS, indexing="ij")
        )
        self._middles_S, self._steepness_S = middles_S, steepness_S
        share_SN = self._share(at)
        start_SA, squares_SA = _best_starts(share_SN, seen, plateaus_A, floor)
        count = len(at)
        least = count * max(noise, _LEAST_NOISE * scale) ** 2
        log_SA = np.log(least + squares_SA)
        shape, place = np.unravel_index(np.argmin(log_SA), log_SA.shape)
        curve_N = (
            start_SA[shape, place] * (1 - share_SN[shape]) + plateaus_A[place] * share_SN[shape]
        )
        log_SA *= -0.5 * _independent(seen - curve_N)
        log_SA -= 0.5 * (np.log(steepness_S / 1.5) / 0.6)[:, None] ** 2
        weight_SA = np.exp(log_SA - log_SA.max())
        # Few points of the grid carry all the weight; the others are left out of every quantile.
        kept = weight_SA > 1e-6
        self._shape, plateau = np.nonzero(kept)
        self._weight = weight_SA[kept] / weight_SA[kept].sum()
        self._start, self._plateau = start_SA[kept], plateaus_A[plateau]
        best = int(np.argmax(self._weight))
        shape = self._shape[best]
        residuals = seen - self._values(share_SN)[best]
        self.residual = float(np.sqrt(np.mean(residuals**2)))
        """Root of the mean squared residual of the best curve."""
        self.best = {
            "start": float(self._start[best]),
            "plateau": float(self._plateau[best]),
            "midpoint": float(middles_S[shape] * self.last),
            "steepness": float(steepness_S[shape]),
        }
        """The parameters with the largest weight: R0, A, C_mid (in units of compute) and B."""

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


def _independent(residual_N: Floats) -> float:
    """The number of independent measurements that n residuals are worth: n (1 - r) / (1 + r), for
    the correlation r of neighbors, and at least `MIN_POINTS`."""
    count, squares = len(residual_N), float(residual_N @ residual_N)
    if squares <= 0:
        return float(count)
    r = float(residual_N[1:] @ residual_N[:-1]) / squares
    return max(count * (1 - r) / (1 + r), float(MIN_POINTS)) if r > 0 else float(count)


def _best_starts(
    share_SN: Floats, seen_N: Floats, plateaus_A: Floats, floor: float
) -> tuple[Floats, Floats]:
    """The best R0 in [floor, A] for each shape and plateau, and the sum of squared residuals."""
    rest_SN = 1 - share_SN
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
