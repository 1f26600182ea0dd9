"""``forecast_coverage_other``: how often a forecast's 90 % interval holds on curves that are no
sigmoids.

The curves are made up: one takes off after three quarters of the compute, one has a second stage in
its second half, one is logarithmic; ``sigmoid`` is of the form that is fitted. `SEEDS` times each,
accuracy is measured with the noise of `PROBLEMS` problems at `POINTS` places. The first half is
fitted, and the curve without noise is compared with the interval at each later place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.rl.forecast.sigmoid import SigmoidFit

SEEDS: Final = 20
POINTS, PROBLEMS = 24, 300
Shape = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def rise(at: float, steepness: float) -> Shape:
    """A curve from 0 to 1 whose middle is ``at``."""
    return lambda c: np.asarray(1 / (1 + (at / c) ** steepness), np.float64)


def _two_stages(c: NDArray[np.float64]) -> NDArray[np.float64]:
    first, second = rise(0.15, 3.0)(c), rise(0.75, 12.0)(c)
    return np.asarray(0.2 + 0.25 * first + 0.35 * second, np.float64)


SHAPES: Final[dict[str, Shape]] = {
    "sigmoid": lambda c: np.asarray(0.2 + 0.6 * rise(0.4, 2.0)(c), np.float64),
    "late take-off": lambda c: np.asarray(0.2 + 0.6 * rise(0.75, 12.0)(c), np.float64),
    "two stages": _two_stages,
    "logarithmic": lambda c: np.asarray(0.2 + 0.1 * np.log1p(50 * c), np.float64),
}
"""By name, accuracy at the share of a run's compute from 0 to 1."""
OTHERS: Final = tuple(name for name in SHAPES if name != "sigmoid")


def coverage(name: str, seed: int) -> float:
    """Returns the share of the second half's places whose value the interval holds."""
    rng = np.random.default_rng((seed, 43))
    at_P = np.arange(1, POINTS + 1) / POINTS
    truth_P = SHAPES[name](at_P)
    seen_P = rng.binomial(PROBLEMS, truth_P) / PROBLEMS
    half = POINTS // 2
    mean = min(max(float(seen_P[:half].mean()), 0.05), 0.95)
    fit = SigmoidFit(
        [float(c) for c in at_P[:half]],
        [float(v) for v in seen_P[:half]],
        floor=0.0,
        ceiling=1.0,
        noise=(mean * (1 - mean) / PROBLEMS) ** 0.5 / 2,
    )
    found = [fit.at(float(c)) for c in at_P[half:]]
    held = [one.low <= v <= one.high for one, v in zip(found, truth_P[half:], strict=True)]
    return float(np.mean(held))


def measure(options: Options) -> Measured:
    """Measures the key, the mean over the seeds of the worst curve."""
    details: dict[str, Any] = {}
    for name in SHAPES:
        found = [coverage(name, options.seed + number) for number in range(SEEDS)]
        error = float(np.std(found, ddof=1)) / SEEDS**0.5
        details[name] = {"held": float(np.mean(found)), "standard_error": error}
    worst = min(details[name]["held"] for name in OTHERS)
    return Measured({"forecast_coverage_other": worst}, details)
