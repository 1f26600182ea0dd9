"""``base_mismatch_found``: faults planted in a packed base, each found by its tensor's name."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.training.keys import Measured, Options
from deltawire import codec
from deltawire.errors import InputError
from deltawire.export.source import bits_of, open_source
from deltawire.placement.base_check import check_module
from deltawire.placement.live import module_tensors
from deltawire.quantization.experts import STACKS, find_experts
from deltawire.quantization.packing import pack_layers
from deltawire.sync.chain.base_statement import BaseStatement, state_base

EXPERTS = "model.layers.{}.mlp.experts.down_proj.{}"


def measure(options: Options) -> Measured:
    """Plant each fault in a fresh model, and ask which tensor is named."""
    stated = _statement(_model("int4-g32", options.seed))
    check_module(stated, _model("int4-g32", options.seed), who="sampler")  # The base itself passes.
    faults = {
        "one code": (EXPERTS.format(1, "codes"), _flip),
        "one scale": (EXPERTS.format(0, "scales"), _flip),
        "swapped": (EXPERTS.format(0, "codes"), _swap),
    }
    named = {}
    for fault, (name, plant) in faults.items():
        model = _model("int4-g32", options.seed)
        plant(model, name)
        named[fault] = (name, _first_difference(stated, model))
    grid = EXPERTS.format(0, "codes")
    named["another grid"] = (grid, _first_difference(stated, _model("mxfp4", options.seed)))
    found = {fault: wanted in said for fault, (wanted, said) in named.items()}
    return Measured(
        {"base_mismatch_found": all(found.values())},
        {fault: said for fault, (_, said) in named.items()},
    )


def _model(form: str, seed: int) -> Any:
    settings: Any = transformers.Qwen3MoeConfig
    config = settings(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=128,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    stacks = {
        name: {one: getattr(module, one).detach() for one in STACKS if hasattr(module, one)}
        for name, module in find_experts(model).items()
    }
    pack_layers(model, form)
    for name, module in find_experts(model).items():
        for one, stack in stacks[name].items():
            weight = getattr(module, one)
            for index in range(len(stack)):
                weight.set_matrix(index, weight.form.quantize(stack[index]))
    return model


def _statement(model: Any) -> BaseStatement:
    source = open_source("bf16", model)
    digests = {name: codec.digest_bits(name, bits) for name, bits in bits_of(source).items()}
    return state_base(source.specs(), digests, packed="int4-g32")


@torch.no_grad()
def _flip(model: Any, name: str) -> None:
    module_tensors(model)[name].view(-1)[3] ^= 1


@torch.no_grad()
def _swap(model: Any, name: str) -> None:
    other = name.replace("layers.0", "layers.1")
    first, second = (module_tensors(model)[one] for one in (name, other))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def _first_difference(stated: BaseStatement, model: Any) -> str:
    try:
        check_module(stated, model, who="sampler")
    except InputError as error:
        return error.message
    return ""
