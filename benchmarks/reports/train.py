"""``deltawire bench train``: predicted memory of training steps against measured memory."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.training_grid import MODELS, Outcome, compare, draw
from benchmarks.training_memory import Case

REAL = {
    f"{name} full {policy}, real tensors": Case(
        config={**MODELS[name], "vocab_size": 8192, "num_hidden_layers": 3},
        ranks=1,
        context=512,
        checkpointing=policy,
        chunk=256,
    )
    for name, policy in (("qwen3", "none"), ("qwen3-moe", "full"))
}
"""Steps that are measured with real allocations, each in a separate process."""


def run(arguments: argparse.Namespace) -> int:
    """Measure the drawn cases and print the table or the JSON."""
    console = Console(stderr=True, highlight=False)
    outcomes: list[Outcome] = []
    for name, case in draw(arguments.cases, arguments.seed).items():
        outcomes.append(compare(name, case))
        console.print(f"{name}: {outcomes[-1].error:+.1%}")
    if arguments.real:
        for name in REAL:
            outcomes.append(_in_own_process(name))
            console.print(f"{name}: {outcomes[-1].error:+.1%}")
    worst = max(abs(outcome.error) for outcome in outcomes)
    if arguments.json:
        cases = [
            {
                "case": outcome.name,
                "predicted": round(outcome.predicted),
                "measured": round(outcome.measured),
                "error": round(outcome.error, 5),
                "phase": outcome.phase,
            }
            for outcome in outcomes
        ]
        figures = {"memory_error_max": round(worst, 5), "seed": arguments.seed, "cases": cases}
        Console().print_json(json.dumps(figures))
        return 0
    table = Table("training step", "predicted", "measured", "error", "peak in")
    for outcome in outcomes:
        sizes = (f"{size / 2**20:,.0f} MiB" for size in (outcome.predicted, outcome.measured))
        table.add_row(outcome.name, *sizes, f"{outcome.error:+.1%}", outcome.phase)
    Console(highlight=False).print(table)
    Console(highlight=False).print(f"largest error {worst:.1%}, floor 10 %")
    return 0


def _in_own_process(name: str) -> Outcome:
    """Compare one case with real allocations in a separate process.

    Freed tensors go back to the system at once, so that resident memory is what is allocated.
    """
    code = (
        "import json\nfrom benchmarks.reports.train import REAL\n"
        "from benchmarks.training_grid import compare\n"
        f"out = compare({name!r}, REAL[{name!r}], real=True)\n"
        "print(json.dumps([out.name, out.predicted, out.measured, out.phase]))"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)},
    )
    return Outcome(*json.loads(done.stdout.splitlines()[-1]))
