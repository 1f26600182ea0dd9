"""``memory_error_max``: predicted peak memory of training steps against measured memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.training.keys import Measured, Options
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


def measure(options: Options) -> Measured:
    """Draws cases by the seed and compares each; with ``real``, two more."""
    outcomes: list[Outcome] = []
    for name, case in draw(options.cases, options.seed).items():
        outcomes.append(compare(name, case))
        sys.stderr.write(f"{name}: {outcomes[-1].error:+.1%}\n")
    if options.real:
        for name in REAL:
            outcomes.append(_in_own_process(name))
            sys.stderr.write(f"{name}: {outcomes[-1].error:+.1%}\n")
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
    worst = max(abs(outcome.error) for outcome in outcomes)
    return Measured({"memory_error_max": round(worst, 5)}, {"cases": cases})


def _in_own_process(name: str) -> Outcome:
    """Compares one case with real allocations in a separate process.

    Freed tensors go back to the system at once, so that resident memory is what is allocated.
    """
    code = (
        "import json\nfrom benchmarks.training.memory_error import REAL\n"
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
