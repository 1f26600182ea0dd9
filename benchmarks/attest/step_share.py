"""``attest_of_step``: what `deltawire.attest.digests` takes of a training step on a real model.

The step is a plain one in float32: forward, backward and AdamW over 64 sequences of 40 tokens, as
many as a step of ``examples/real/sums.toml`` has, without clipping, rewards or publishing. Both are
measured in turns on the same threads. Without the model's files the key has no value.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.runner import ROOT
from benchmarks.training.keys import Measured, Options
from deltawire.attest import digests

MODEL = ROOT / "models/smollm2-135m"
SEQUENCES, LENGTH, TOGETHER = 64, 40, 16


def measure(options: Options) -> Measured:
    """Measures steps and digests in turns; the key is the quotient of their medians."""
    if not (MODEL / "model.safetensors").is_file():
        return Measured({"attest_of_step": None}, {"reason": f"{MODEL} is missing"})
    torch.manual_seed(options.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, LENGTH))
    steps: list[float] = []
    looks: list[float] = []
    used: list[tuple[float, float]] = []
    for _ in range(options.repeats):
        began, at = time.perf_counter(), time.process_time()
        for first in range(0, SEQUENCES, TOGETHER):
            part = tokens[first : first + TOGETHER]
            (model(input_ids=part, labels=part).loss * len(part) / SEQUENCES).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - began)
        began, between = time.perf_counter(), time.process_time()
        digests(model, dtype="bfloat16")
        looks.append(time.perf_counter() - began)
        used.append((between - at, time.process_time() - between))
    details = {
        "steps_s": steps,
        "digests_s": looks,
        "processor_s": used,
        "threads": torch.get_num_threads(),
    }
    return Measured({"attest_of_step": median(looks) / median(steps)}, details)
