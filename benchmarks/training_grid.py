"""The grid of training steps on which predicted memory is compared with measured memory."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.training_memory import Case, measure, measure_real
from deltawire.plan.architecture import Model
from deltawire.plan.configuration import decode_config
from deltawire.plan.families import describe
from deltawire.plan.layout import TrainingLayout
from deltawire.plan.memory import predict_memory

_SHARED: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = {**_SHARED, "num_key_value_heads": 4, "head_dim": 64}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 384,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "intermediate_size": 2048,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**_GROUPED, "model_type": "qwen3", "intermediate_size": 3072, "head_dim": 128},
    "llama-tied": {
        **_SHARED,
        "model_type": "llama",
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "tie_word_embeddings": True,
    },
    "qwen2-wide-vocabulary": {
        **_SHARED,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
    "qwen3-moe": {
        **_GROUPED,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 384,
        "intermediate_size": 2048,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "glm4-moe": {**_GROUPED, **_ROUTED, "model_type": "glm4_moe", "use_qk_norm": True},
    "deepseek-v3": {
        **_SHARED,
        **_ROUTED,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 96,
    },
}
POLICIES = ("none", "selective", "full", "offloaded")


@dataclass(frozen=True)
class Outcome:
    """Predicted and measured peak of one step, in bytes."""

    name: str
    predicted: float
    measured: float
    phase: str

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def grid() -> dict[str, Case]:
    """Returns every case by name."""
    return dict(_cases())


def _cases() -> Iterator[tuple[str, Case]]:
    kinds = ("full", "lora", "packed", "reference")
    ranks = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2))
    for name, kind, (world, replicate), policy, context in itertools.product(
        MODELS, kinds, ranks, POLICIES, (1024, 4096)
    ):
        config = MODELS[name]
        routed = "moe" in name or name == "deepseek-v3"
        if (kind == "packed" and not routed) or (kind == "reference" and policy != "none"):
            continue
        copies = f"/{replicate}" if replicate > 1 else ""
        label = f"{name} {kind} {policy} {world}{copies} ranks, {context} tokens"
        yield (
            label,
            Case(
                config=config,
                ranks=world,
                replicate=replicate,
                context=context,
                mode="lora" if kind == "packed" else kind,
                checkpointing=policy,
                chunk=512,
                lora_rank=16 if kind in {"lora", "packed"} else 0,
                packed=kind == "packed",
            ),
        )
    for name, expert, policy, context in itertools.product(
        ("qwen3-moe", "glm4-moe", "deepseek-v3"), (2, 4, 8), POLICIES, (1024, 4096)
    ):
        yield (
            f"{name} spread {policy} 8 ranks, experts over {expert}, {context} tokens",
            Case(
                config=MODELS[name],
                expert=expert,
                context=context,
                checkpointing=policy,
                chunk=512,
            ),
        )


def draw(count: int, seed: int) -> dict[str, Case]:
    """Draws cases by a seed: as many of each kind and policy as can be, and every rank count."""
    cases = grid()
    names = sorted(cases)
    random.Random(seed).shuffle(names)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        _, kind, policy, *_ = name.split(" ")
        groups.setdefault((kind, policy), []).append(name)
    chosen: list[str] = []
    waiting = itertools.cycle(groups.values())
    while len(chosen) < min(count, len(names)):
        group = next(waiting)
        if group:
            chosen.append(group.pop())
    return {name: cases[name] for name in chosen}


def model_of(case: Case) -> Model:
    """Describes a case's model."""
    return describe(decode_config(json.dumps(case.config).encode(), where="case"), name="case")


def layout_of(case: Case) -> TrainingLayout:
    """Returns the layout that the memory model takes for a case."""
    return TrainingLayout(
        mode=case.mode,  # type: ignore[arg-type]
        data=case.ranks // case.replicate,
        expert=case.expert,
        replicate=case.replicate,
        context=case.context,
        sequences=case.sequences,
        checkpointing=case.checkpointing,  # type: ignore[arg-type]
        chunk=case.chunk,
        lora_rank=case.lora_rank,
        packing="int4" if case.packed else "none",
    )


def compare(name: str, case: Case, *, real: bool = False) -> Outcome:
    """Predicts and measures one case; ``real`` allocates the tensors, on one rank."""
    peak = predict_memory(model_of(case), layout_of(case))
    measured = measure_real(case) if real else measure(case)["Total"]
    return Outcome(name, peak.total, measured, peak.phase)
