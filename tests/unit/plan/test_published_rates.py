"""Tokens a second that others published, next to the estimate of the same layout.

Six figures decided the utilization of A100 and of Hopper, the others test it. Where checkpointing
was not published, it is the least for which the memory model says that the step fits.
"""

import dataclasses
import json
from statistics import geometric_mean, median

import pytest

from deltawire.plan.accelerators import Accelerator, shipped_accelerators
from deltawire.plan.catalogue import find_model
from deltawire.plan.layout import TrainingLayout
from deltawire.plan.memory import predict_memory
from deltawire.plan.step_time import estimate_step

TITAN_A100 = "torchtitan docs/performance.md, June 2024"
TITAN_H100 = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md, 500 W, compiled"
NEMO = "NeMo AutoModel docs/performance-summary.md, DGX-H100, April 2026"
MAXTEXT = "MaxText reference/models/tiering, v0.2.0"

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
LARGE = {
    **LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "intermediate_size": 28672,
}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen2", "vocab_size": 152064}
CONFIGS = {
    "llama3-8b": LLAMA,
    "llama3-70b": LARGE,
    "qwen2.5-7b": {
        **QWEN, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944,
    },
    "qwen2.5-32b": {
        **QWEN, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
        "intermediate_size": 27648,
    },
}  # fmt: skip
TPUS = {
    # A data sheet's figures; the utilization is fitted to the first row below that uses it.
    "v6e": Accelerator(
        "v6e", 32, 1640, 918, 90, 90, 16, 256, 65536, "Google's data sheet", False, "", 0.46
    ),
}


def full(accelerators, checkpointing, *, context=8192, **other):
    return TrainingLayout(data=accelerators, context=context, checkpointing=checkpointing, **other)


def lora(accelerators, tensor=1):
    return TrainingLayout(
        mode="lora", data=accelerators // tensor, tensor=tensor, context=4096, sequences=2,
        lora_rank=16, checkpointing="none",
    )  # fmt: skip


FITTED = [
    ("llama3-8b", "a100-80gb", full(64, "selective"), 2973, TITAN_A100),
    ("llama3-70b", "a100-80gb", full(64, "full"), 331, TITAN_A100),
    ("llama3-8b", "h100", full(8, "selective", sequences=2), 6667, TITAN_H100),
    ("llama3-70b", "h100", full(32, "none", context_parallel=2), 866.77, NEMO),
    ("llama3-8b", "h100", lora(1), 12472.87, NEMO),
    ("llama3-8b", "v6e", full(256, "selective"), 7207, MAXTEXT),
]
TESTED = [
    ("llama3-8b", "h100", full(128, "selective", sequences=2), 6514, TITAN_H100),
    ("qwen2.5-7b", "h100", lora(1), 14110.05, NEMO),
    ("llama3-70b", "h100", lora(8, tensor=2), 1091.85, NEMO),
    ("qwen2.5-32b", "h100", lora(8, tensor=2), 2250.31, NEMO),
    ("qwen3-30b-a3b", "h100",
     full(8, "none", context=4096, sequences=4, expert=8), 12040, NEMO),
    ("llama3-70b", "v6e", full(256, "selective"), 960, MAXTEXT),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    found = {}
    for name, config in CONFIGS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        found[name] = find_model(str(path))[0]
    return {**found, "qwen3-30b-a3b": find_model("qwen3-30b-a3b")[0]}


def ratio(models, row):
    """The estimated tokens a second over the published ones."""
    name, kind, layout, published, _ = row
    model, accelerator = models[name], {**shipped_accelerators(), **TPUS}[kind]
    if layout.checkpointing == "none":  # Not published.
        layouts = [
            dataclasses.replace(layout, checkpointing=policy)
            for policy in ("none", "selective", "full")
        ]
        layout = next(
            one
            for one in layouts
            if predict_memory(model, one).with_allowance <= accelerator.usable_bytes
        )
    estimate = estimate_step(model, layout, accelerator)
    return estimate.tokens_per_second / layout.ranks / published


def test_six_other_figures_are_estimated_within_15_percent(models):
    errors = [abs(ratio(models, row) - 1) for row in TESTED]
    assert median(errors) <= 0.15
    assert max(errors) <= 0.25  # torchtitan's H100, at 500 of 700 W.


@pytest.mark.parametrize("kind", ["a100-80gb", "h100"])
def test_the_shipped_utilization_is_the_fit(models, kind):
    ratios = [ratio(models, row) for row in FITTED if row[1] == kind]
    assert geometric_mean(ratios) == pytest.approx(1, abs=0.03)
    assert max(abs(one - 1) for one in ratios) <= 0.25
    alike = {"h100": ("h200", "h800")}.get(kind, ())
    table = shipped_accelerators()
    assert all(table[one].utilization == table[kind].utilization for one in alike)
