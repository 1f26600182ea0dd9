"""Simulates runs: publishers, readers and retention on a simulated clock, network and store.

Each seed is one history, to the bit; ``--hours`` simulates seeds from ``--first`` on, ``--seed``
one of them. A history in which something does not hold is made smaller and printed, and the exit
code is 1. ``--broken`` simulates the code without one of its rules, each until that is found.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from time import process_time

# Sets of strings have one order in all histories of a seed.
if os.environ.get("PYTHONHASHSEED") != "0":
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "simulation"))

import msgspec  # noqa: F401  # Modules of others keep the real clock and locks.
import numpy as np  # noqa: F401
import obstore  # noqa: F401
import simulated_time

simulated_time.install()

from simulate import FAULTS_S, History, shrink, simulate  # noqa: E402
from simulation_broken import BROKEN, Broken  # noqa: E402

from deltawire.sync.publish import interpreter_exit  # noqa: E402


def report(*lines: str) -> None:
    """Prints lines at once."""
    print(*lines, sep="\n", flush=True)  # noqa: T201


def describe(found: History, *, lines: int) -> None:
    """Prints a history that fails: its faults, and what came last."""
    report(f"seed {found.seed}: {found.fault}", "with the faults")
    report(*(f"    {one}" for one in found.faults), "and at last", *found.last[-lines:])


def simulate_hours(first: int, hours: float, faults_s: float, lines: int) -> int:
    """Simulates seeds until so many hours have passed in them; returns the number that fail."""
    began, passed, requests, wrong, seed = process_time(), 0.0, 0, 0, first
    while passed < hours:
        found = simulate(str(seed), faults_s=faults_s)
        passed, requests = passed + found.hours, requests + found.requests
        if found.fault:
            wrong += 1
            describe(shrink(found, faults_s=faults_s), lines=lines)
        seed += 1
    used = process_time() - began
    report(
        f"{seed - first} seeds from {first}, {passed:.1f} simulated hours, {requests:,} requests, "
        f"{used:.0f} s of a core ({passed / used * 60:.0f} hours a minute), {wrong} failed"
    )
    return wrong


def find(broken: Broken, most_s: float, faults_s: float) -> History | None:
    """Simulates seeds without a rule until one fails; None if none does in this time."""
    began, hours, seed = process_time(), 0.0, 0
    with broken.applied():
        while process_time() - began < most_s:
            seed += 1
            found = simulate(str(seed), faults_s=faults_s, store=broken.store)
            hours += found.hours
            if found.fault:
                report(
                    f"{seed:>4} seeds {hours:>7.1f} h {process_time() - began:>6.1f} s  "
                    f"{broken.name}: {found.fault}"
                )
                return found
    spent = f"{seed:>4} seeds {hours:>7.1f} h {process_time() - began:>6.1f} s"
    report(f"{spent}  NOT FOUND: {broken.name}")
    return None


def main() -> int:
    """Simulates what the arguments say; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", help="simulates this seed, twice, and compares the histories")
    parser.add_argument("--first", type=int, default=1, metavar="N")
    parser.add_argument("--hours", type=float, default=100.0)
    parser.add_argument("--faults", type=float, default=FAULTS_S, metavar="SECONDS")
    parser.add_argument("--lines", type=int, default=40, help="of a failing history")
    parser.add_argument("--broken", metavar="WORD", help="finds rules that were taken out")
    parser.add_argument("--rare", action="store_true", help="those that take hours, too")
    parser.add_argument("--most", type=float, default=600.0, metavar="SECONDS")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    interpreter_exit.report = lambda _: None
    if options.broken is not None:
        chosen = [one for one in BROKEN if options.broken in one.name]
        chosen = [one for one in chosen if options.rare or not one.rare]
        return sum(find(one, options.most, options.faults) is None for one in chosen)
    if options.seed is not None:
        first, second = (simulate(options.seed, faults_s=options.faults) for _ in range(2))
        if first.fault:
            describe(first, lines=options.lines)
        report(f"{first.digest}, {first.hours:.2f} hours, {dict(first.counts)}")
        return int(bool(first.fault) or first.digest != second.digest)
    return int(simulate_hours(options.first, options.hours, options.faults, options.lines) > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Python's own end would wait for simulated locks.
