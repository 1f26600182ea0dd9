"""The keys of ``deltawire bench budget``, measured as `benchmarks.training.keys` describes.

To add a key: one module of this folder with ``measure(options) -> Measured``, one line in `KEYS`.
A module that trains measures one cell for each seed with `benchmarks.budget.cells`.
"""

from __future__ import annotations

from typing import Final

from benchmarks.training.keys import Key

PACKAGE: Final = "benchmarks.budget"

KEYS: Final[dict[str, Key]] = {
    "allocation_gain": Key(
        "allocation", ">=", 1.3, "tokens to a set accuracy, fixed group size over allocated"
    ),
    "allocation_gain_over_refill": Key(
        "allocation", ">=", 1.0, "the same, DAPO's refill over allocated"
    ),
    "allocation_gain_other": Key(
        "other_sets", ">=", 1.0, "the same, best arm without pilots over allocated, worst other set"
    ),
    "forecast_error": Key(
        "forecasts", "<=", 0.03, "median error of a forecast of the second half of a run"
    ),
    "forecast_over_carried": Key(
        "forecasts", "<=", 1.0, "that over the error of carrying the last value forward"
    ),
    "forecast_error_like": Key(
        "forecasts", "<=", 0.03, "forecast_error with the runs of the other seeds as a prior"
    ),
    "forecast_coverage_other": Key(
        "other_curves", ">=", 0.8, "90 % intervals that hold on curves of other forms, the worst"
    ),
    "auto_vs_best_fixed": Key(
        "controlled", ">=", -1, "accuracy of the controller less the best fixed budget, in errors"
    ),
    "auto_vs_worst_fixed": Key(
        "controlled", ">=", 2, "the same less the worst fixed budget, in standard errors"
    ),
    "auto_vs_fixed_other": Key(
        "other_worlds", ">=", 1.0, "accuracy of the controller over the best fixed, worst world"
    ),
    "area_gain": Key(
        "controlled", ">=", 2, "area under accuracy over budgets less version 0, in errors"
    ),
    "budget_violations": Key("enforcement", "<=", 0, "turns that think longer than their budget"),
    "forced_tokens_in_loss": Key("enforcement", "<=", 0, "inserted tokens that a loss would read"),
}
"""Every key, in the order of the table."""
