"""Counted FLOPs against torch's own counter, on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltawire.plan.accelerators import shipped_accelerators
from deltawire.plan.catalogue import catalogue
from deltawire.plan.configuration import decode_config
from deltawire.plan.families import describe
from deltawire.plan.layout import TrainingLayout
from deltawire.plan.step_time import estimate_step, forward_flops, step_flops

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "tie_word_embeddings": False,
}
ROUTED = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


@pytest.mark.parametrize("config", [DENSE, ROUTED], ids=["dense", "experts"])
def test_flops_equal_those_of_torchs_counter(config: dict[str, Any]) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.randint(0, 320, (2, 32))
    with FlopCounterMode(display=False) as counter:
        loss = model(ids).logits.sum()
        forward = counter.get_total_flops()
        loss.backward()
    ours = describe(decode_config(json.dumps(config).encode(), where="test"), name="test")
    layout = TrainingLayout(context=32, sequences=2, checkpointing="none")
    # Beyond products of weights and of attention, the counter has the rotary angles' small one.
    assert forward_flops(ours, layout) == pytest.approx(forward, rel=0.02)
    assert step_flops(ours, layout) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_recompute_adds_a_forward_and_frozen_weights_save_one() -> None:
    model = catalogue()["qwen3-8b"].describe()
    once = forward_flops(model, TrainingLayout())
    assert step_flops(model, TrainingLayout(checkpointing="full")) == 4 * once
    assert step_flops(model, TrainingLayout(checkpointing="none")) == 3 * once
    lora = TrainingLayout(mode="lora", lora_rank=8, checkpointing="none")
    assert step_flops(model, lora) == 2 * once
    assert step_flops(model, TrainingLayout(mode="reference")) == once


def test_offload_over_a_slow_link_bounds_a_short_step() -> None:
    model, h100 = catalogue()["qwen3-8b"].describe(), shipped_accelerators()["h100"]
    short, long = (
        estimate_step(model, TrainingLayout(data=8, context=length, offload="all"), h100)
        for length in (256, 32768)
    )
    assert short.seconds == short.host
    assert long.seconds == long.compute
