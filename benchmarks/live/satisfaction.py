"""``satisfaction_gain``: true satisfaction of simulated users at the end over that at the start.

Each of `SEEDS` seeds is one ``deltawire simulate benchmarks/live/users.toml``: real processes,
requests over HTTP, weights through a bucket, and no release: every version serves at once. A seed's
gain is the mean true satisfaction of the last fifth of the time less that of the first. The key is
the mean over the seeds, and ``satisfaction_gain_errors`` that mean over its standard error.

A seed that was measured is kept in ``--out`` and not measured again. ``--repeats`` is how many
seeds are measured at most now; while one is missing both keys are null.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.live.seeds import read_report, run_seed
from benchmarks.training.keys import Measured, Options
from deltawire.dashboard.simulation import SimulationReport

USERS = Path(__file__).with_name("users.toml")
SEEDS = 5
SECONDS = 120.0
LIMIT_S = 900.0
"""Seconds that one seed may take, on a machine that is busy with other work too."""


def summarize(reports: dict[int, SimulationReport | None]) -> Measured:
    """Returns the keys; both are None while a seed is missing."""
    cells: dict[str, Any] = {
        str(seed): None
        if one is None
        else {"gain": one.gain, "first": one.first, "last": one.last, "versions": one.versions}
        for seed, one in reports.items()
    }
    found = [one.gain for one in reports.values() if one is not None]
    details: dict[str, Any] = {"seeds": cells}
    if len(found) < len(reports):
        missing = [seed for seed, one in reports.items() if one is None]
        details["missing"] = f"seeds {missing} are not measured: call it again with the same --out"
        return Measured({"satisfaction_gain": None, "satisfaction_gain_errors": None}, details)
    mean, error = statistics.fmean(found), statistics.stdev(found) / len(found) ** 0.5
    details["standard_error"] = error
    return Measured(
        {"satisfaction_gain": mean, "satisfaction_gain_errors": mean / max(error, 1e-12)}, details
    )


def measure(options: Options) -> Measured:
    """Measures both keys, as far as ``--repeats`` seeds go."""
    out = Path(options.out or "runs/bench-live")
    folders = {seed: out / f"seed-{seed}" for seed in range(options.seed, options.seed + SEEDS)}
    missing = [seed for seed, folder in folders.items() if read_report(folder) is None]
    for seed in missing[: options.repeats]:
        run_seed(
            folders[seed], seed, config=USERS, span=("--seconds", str(SECONDS)), limit_s=LIMIT_S
        )  # fmt: skip
    return summarize({seed: read_report(folder) for seed, folder in folders.items()})
