"""Explores the protocol of the bucket in every order of its processes' steps (make check-protocol).

Prints a line for each world, with the number of states, and the shortest trace that refutes each
broken protocol. ``--only WORD`` takes those whose names contain the word, ``--traces`` prints the
traces in full. Exit code 1: an invariant does not hold, or a broken protocol was not refuted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "protocol"))

from cases import BROKEN, CASES, check, refute


def report(*lines: str) -> None:
    """Prints lines at once: an exploration takes minutes."""
    print(*lines, sep="\n    ", flush=True)  # noqa: T201


def main() -> int:
    """Explores every world and refutes every broken protocol; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--traces", action="store_true")
    options = parser.parse_args()
    wrong = 0
    report(f"{'states':>10} {'steps':>10} {'deepest':>7} {'s':>6}  what holds in every order")
    for case in CASES:
        if options.only not in case.name:
            continue
        found = check(case)
        wrong += bool(found.fault)
        report(
            f"{found.states:>10,} {found.steps:>10,} {found.depth:>7} {found.seconds:>6.1f}  "
            f"{case.name} ({case.bounds.faults} faults, {case.bounds.ticks} ticks)"
        )
        if found.fault:
            report(f"  WRONG: {found.fault}", *found.trace)
    report(f"\n{'states':>10} {'steps of trace':>14} {'s':>6}  what is refuted")
    for broken in BROKEN:
        if options.only not in broken.name:
            continue
        found = refute(broken)
        refuted = bool(found.fault) and broken.fault in found.fault
        wrong += not refuted
        report(
            f"{found.states:>10,} {len(found.trace):>14} {found.seconds:>6.1f}  "
            f"{broken.name}: {found.fault if refuted else 'NOT REFUTED'}",
            *(found.trace if options.traces else ()),
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
