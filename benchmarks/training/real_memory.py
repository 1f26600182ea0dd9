"""``real_memory_error``: predicted memory of processes on a real model against what they held.

Each case is one process (`benchmarks.training.process_memory`), or one for each rank. A trainer
starts a run, trains and publishes; then a worker and an evaluator open that run at version 0,
sample, and swap to each version. They have the variables that `deltawire run` gives its children.
No constant of the prediction (`deltawire.plan.run_memory`) is taken from these processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.ports import free_port
from benchmarks.runner import ROOT
from benchmarks.training.keys import Measured, Options
from benchmarks.training.process_memory import Case, Held
from deltawire.plan.catalogue import find_model
from deltawire.plan.run_memory import sampler_parts, trainer_memory
from deltawire.runtime.children import HEAP
from deltawire.train.rank_agent import rank_environment

MODEL = ROOT / "models/smollm2-135m"
SAMPLERS = (
    {"role": "worker", "slots": 64, "length": 256},
    {"role": "worker", "slots": 8, "length": 2048, "prompt": 2016},
    {"role": "evaluator", "slots": 64, "length": 256, "prompt": 224},
    {"role": "evaluator", "slots": 8, "length": 2048, "prompt": 2016},
)


def cases() -> list[list[Case]]:
    """Returns trainers, each followed by the samplers of its run."""
    found = []
    # 24 sequences of at most 126 tokens fill one batch of 2,048: 2,024 with three prompts.
    for tokens, sequences, steps, length in ((256, 32, 2, 128), (2048, 24, 1, 126)):
        for mode in ("full", "lora"):
            for ranks in (1, 2):
                trainer = Case(
                    model=str(MODEL), mode=mode, tokens=tokens, sequences=sequences * ranks,
                    steps=steps, length=length, ranks=ranks,
                )  # fmt: skip
                found.append([trainer])
    for together in found[0:4:2]:  # One rank and 256 tokens: full and LoRA.
        trainer = together[0]
        together += [
            msgspec.structs.replace(trainer, sequences=16, **sampler) for sampler in SAMPLERS
        ]
    return found


def measure(options: Options) -> Measured:
    """Measures all cases; without the model's files the key has no value."""
    del options
    if not (MODEL / "model.safetensors").is_file():
        return Measured(
            {"real_memory_error": None}, {"missing": "make real-model downloads the model"}
        )
    rows: list[dict[str, object]] = []
    for together in cases():
        with tempfile.TemporaryDirectory(prefix="deltawire-memory-") as folder:
            rows += [row_of(case, folder) for case in together]
    worst = max(abs(float(str(row["error"]))) for row in rows)
    return Measured({"real_memory_error": worst}, {"cases": rows})


def row_of(case: Case, folder: str) -> dict[str, object]:
    """Runs a case and returns its figures."""
    found, predicted = run_case(case, folder), predict(case)
    error = predicted / found.peak - 1
    sys.stderr.write(f"{case.name}: {error:+.1%}\n")
    return {
        "case": case.name,
        "predicted": round(predicted),
        "measured": found.peak,
        "ready": found.ready,
        "after_steps": found.steps,
        "error": round(error, 4),
    }


def predict(case: Case) -> float:
    """Returns the bytes that are predicted for a case."""
    model, _ = find_model(case.model)
    if case.role == "trainer":
        return trainer_memory(model, case.config(), tokens=case.tokens).total
    prompts = case.slots if case.role == "evaluator" else case.slots // 8
    return sum(sampler_parts(model, case.config(), slots=case.slots, prompts=prompts).values())


def run_case(case: Case, folder: str) -> Held:
    """Runs a case in a process for each rank; returns what the largest of them held."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    argument = msgspec.json.encode(case).decode()
    port = free_port()
    ranks = []
    for rank in range(case.ranks):
        own = rank_environment(rank, case.ranks, local_rank=rank, address="127.0.0.1", port=port)
        ranks.append(
            subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
                [sys.executable, "-m", "benchmarks.training.process_memory", argument, folder],
                stdout=subprocess.PIPE,
                cwd=Path(ROOT),
                env={**HEAP, **os.environ, "PYTHONPATH": path, **own},
            )
        )
    found = []
    for one in ranks:
        output, _ = one.communicate()
        if one.returncode:
            raise subprocess.CalledProcessError(one.returncode, one.args)
        found.append(msgspec.json.decode(output.splitlines()[-1], type=Held))
    return max(found, key=lambda held: held.peak)
