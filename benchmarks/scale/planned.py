"""Compares plans and simulations with runs that are made right after their rates are measured."""

from __future__ import annotations

import signal
import sys
from statistics import median, quantiles

import msgspec

from benchmarks.scale.plan_runs import GROUPS, make_runs
from benchmarks.training.keys import Measured, Options
from deltawire.plan.fleet.simulation.transfers import simulate_transfer

STEPS = 3
ROUNDS = 3


def measure(options: Options) -> Measured:
    """Makes every configuration and returns the errors; each row is in the details.

    Needs the right to administer networks, for links with a rate.
    """
    # A time limit's signal must still remove the namespaces.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    made = make_runs(
        GROUPS, steps=max(STEPS, options.repeats), rounds=ROUNDS, report=_report,
        simulate=simulate_transfer,
    )  # fmt: skip
    times = [one.time_error for one in made]
    simulated = [abs(one.simulated_s / one.seconds - 1) for one in made]
    return Measured(
        {
            "plan_time_error": median(times),
            "plan_time_error_p90": quantiles(times, n=10)[-1],
            "plan_bytes_error": max(one.bytes_error for one in made),
            "simulation_error": median(simulated),
        },
        {"configurations": len(made), "rows": msgspec.to_builtins(made)},
    )


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
