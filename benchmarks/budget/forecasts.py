"""``forecast_error``: how far the second half of a run lies from the forecast of its first half.

Each cell is a run of the trainer's own `train_step` with groups of one size, on prompts that a
small model solves at first in 5, 20 and 35 % of its answers. Accuracy is read from the model's own
distribution, so it has no noise of sampling. The rates and the measure were named before the first
cell was measured: the median of the absolute errors at all measurements of the second half of the
tokens, over the runs that gain at least 0.10 there. The first run had 160 steps and gained 0.07 in
its second half; 60 steps were set after it, for all seeds.

``forecast_error_like`` is the same with the curves of the other seeds' runs as a prior, as of
earlier runs (``deltawire forecast --like``). It was added after the first key had missed its goal;
the prior's constants were set before it was first measured.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks.budget.allocation import Session
from benchmarks.budget.cells import Cells
from benchmarks.training.keys import Measured, Options
from deltawire.config.allocation import AllocationConfig
from deltawire.rl.forecast.forecast import Curve, CurvePoint, backtest_of, prior_of

STEPS: Final = 60
RATES: Final = (0.05, 0.20, 0.35)
LEAST_GAIN: Final = 0.10
NAME: Final = "forecast"


def run_curve(seed: int) -> dict[str, Any]:
    """Trains one run; returns the tokens, sampled and trained, and the accuracy after each step."""
    session = Session(AllocationConfig(), seed, rates=RATES)
    curve = [(0, round(float(session.set.pass_rates().mean()), 5))]
    for _ in range(STEPS):
        accuracy = session.train()
        curve.append((session.sampled + session.trained, round(accuracy, 5)))
    return {"curve": curve}


def halves(cells: Cells, *, like: bool = False) -> list[dict[str, float]] | None:
    """The backtest of each seed's run, None if a cell is missing; with ``like``, the other seeds'
    runs are a prior."""
    stored = cells.all(NAME)
    if stored is None:
        return None
    curves = []
    for cell in stored:
        points = tuple(
            CurvePoint(version=version, compute=float(tokens), value=value)
            for version, (tokens, value) in enumerate(cell["curve"])
        )
        curves.append(Curve("accuracy", "tokens", points, 0.0, 1.0, 0.0))
    found = []
    for number, curve in enumerate(curves):
        others = [one for place, one in enumerate(curves) if place != number]
        test = backtest_of(curve, prior_of(others) if like else None)
        if test is not None:
            found.append({"error": test.error, "carried": test.carried_error, "gain": test.gain})
    return found


def measure(options: Options) -> Measured:
    """Measures the cells that are missing, then scores all."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    cells = Cells(Path(options.out) / NAME)
    for seed in range(options.seed, min(options.seed + options.cases, cells.seeds.stop)):
        cells.measure(NAME, seed, lambda seed=seed: run_curve(seed))  # type: ignore[misc]
    found, informed = halves(cells), halves(cells, like=True)
    gaining = [one for one in found or [] if one["gain"] >= LEAST_GAIN]
    details = {"halves": found, "halves_like": informed, "gaining": len(gaining)}
    if not gaining:
        nothing = dict.fromkeys(("forecast_error", "forecast_error_like", "forecast_over_carried"))
        return Measured(nothing, details)
    error, carried = (median(one[name] for one in gaining) for name in ("error", "carried"))
    values = {
        "forecast_error": error,
        "forecast_error_like": median(
            one["error"] for one in informed or [] if one["gain"] >= LEAST_GAIN
        ),
        "forecast_over_carried": error / carried,
    }
    return Measured(values, details)
