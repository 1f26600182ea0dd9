"""``real_memory_error``: predicted memory of a trainer on a real model against its resident peak.

Each case is a process (`benchmarks.training.process_memory`) that starts a run, trains and
publishes. It has the variables that `deltawire run` gives its children. No constant of the
prediction (`deltawire.plan.run_memory`) is taken from these processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.runner import ROOT
from benchmarks.training.keys import Measured, Options
from benchmarks.training.process_memory import Case, Held
from deltawire.plan.catalogue import find_model
from deltawire.plan.run_memory import trainer_memory
from deltawire.runtime.children import HEAP

MODEL = ROOT / "models/smollm2-135m"
CASES = tuple(
    Case(
        model=str(MODEL), mode=mode, tokens=tokens, sequences=sequences, steps=steps, length=length
    )
    # 24 sequences of at most 126 tokens fill one batch of 2,048: 2,024 with three prompts.
    for tokens, sequences, steps, length in ((256, 32, 2, 128), (2048, 24, 1, 126))
    for mode in ("full", "lora")
)


def measure(options: Options) -> Measured:
    """Measures all cases; without the model's files the key has no value."""
    del options
    if not (MODEL / "model.safetensors").is_file():
        return Measured(
            {"real_memory_error": None}, {"missing": "make real-model downloads the model"}
        )
    rows = []
    for case in CASES:
        found, predicted = run_case(case), predict(case)
        rows.append(
            {
                "case": case.name,
                "predicted": round(predicted),
                "measured": found.peak,
                "ready": found.ready,
                "after_steps": found.steps,
                "error": round(predicted / found.peak - 1, 4),
            }
        )
        sys.stderr.write(f"{case.name}: {predicted / found.peak - 1:+.1%}\n")
    worst = max(abs(float(str(row["error"]))) for row in rows)
    return Measured({"real_memory_error": worst}, {"cases": rows})


def predict(case: Case) -> float:
    """Returns the bytes that are predicted for a case."""
    model, _ = find_model(case.model)
    return trainer_memory(model, case.config(), tokens=case.tokens).total


def run_case(case: Case) -> Held:
    """Runs a case in a separate process."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(  # noqa: S603 - our own interpreter, our own module
        [
            sys.executable,
            "-m",
            "benchmarks.training.process_memory",
            msgspec.json.encode(case).decode(),
        ],
        check=True,
        stdout=subprocess.PIPE,
        cwd=Path(ROOT),
        env={**HEAP, **os.environ, "PYTHONPATH": path},
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Held)
