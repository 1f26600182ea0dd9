"""Mixture-of-experts layers with LoRA per expert, over frozen stacks that may stay packed.

One expert's matrix is dequantized at a time. Tokens are gathered by expert, and results are added
in the order of the experts, as the eager implementation of transformers does, so that outputs and
gradients are those over the dequantized stacks to the bit.

Shapes: T tokens, K experts a token, E experts, D hidden size, F intermediate size, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from deltawire.errors import InputError
from deltawire.quantization.linear import PackedWeight, packed_matmul

IMPLEMENTATION = "deltawire_packed"
STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""The names of expert stacks in transformers' models."""


class ExpertAdapter(nn.Module):
    """LoRA on a stack of expert matrices: ΔW_e = scale · B_e · A_e.

    ``lora_A`` is [E, r, inputs] and ``lora_B`` [E, outputs, r], trainable. With ``shared``, the
    factor on the outside of the layer, A of the first matrix or B of the last, is one for all
    experts: its first dimension is 1.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        rank: int,
        scale: float,
        shared: str = "",
        device: Any = None,
    ) -> None:
        super().__init__()
        experts, outputs, inputs = shape
        if shared not in ("", "A", "B"):
            raise InputError(f"there is no shared factor {shared[:80]!r}", hint="use A or B")
        self.scale = scale
        self.enabled = True
        size_a = (1 if shared == "A" else experts, rank, inputs)
        size_b = (1 if shared == "B" else experts, outputs, rank)
        self.lora_A = nn.Parameter(torch.empty(size_a, device=device))
        self.lora_B = nn.Parameter(torch.zeros(size_b, device=device))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Draws A as PEFT does (Kaiming, a = √5) and sets B to 0: the adapter has no effect."""
        bound = 1 / math.sqrt(self.lora_A.shape[-1])
        self.lora_A.uniform_(-bound, bound)
        self.lora_B.zero_()

    def matrices(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Returns A_e and B_e of each expert. Unbound once, so that their gradients are stacked
        once instead of added to a full stack for each expert."""
        first, second = self.lora_A.unbind(), self.lora_B.unbind()
        count = max(len(first), len(second))
        return list(
            zip(
                first * (count // len(first)),
                second * (count // len(second)),
                strict=True,
            )
        )


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of fused experts by name: those with two 3-D stacks, packed or not."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "has_gate")
        and sum(isinstance(stack_of(module, one), nn.Module | nn.Parameter) for one in STACKS) == 2
    }


def stack_of(experts: Any, name: str) -> nn.Parameter | PackedWeight | None:
    """Returns a stack of a module of experts, None if it has none of that name."""
    found = getattr(experts, name, None)
    return found if isinstance(found, nn.Parameter | PackedWeight) else None


def replace_stacks(experts: Any, form: str) -> None:
    """Replaces the stacks of a module of experts by packed ones without values, and its forward
    pass by `packed_experts`."""
    for name in STACKS:
        stack = stack_of(experts, name)
        if not isinstance(stack, nn.Parameter):
            continue
        count, rows, columns = stack.shape
        shape = (count, columns, rows) if experts.is_transposed else (count, rows, columns)
        delattr(experts, name)
        setattr(experts, name, PackedWeight(form, shape, device=stack.device))
    experts.config._experts_implementation = IMPLEMENTATION


def add_expert_adapter(
    experts: Any, name: str, *, rank: int, scale: float, shared: bool = False
) -> ExpertAdapter:
    """Adds LoRA to a stack; with ``shared``, the factor on the outside is one for all.

    Raises `InputError` if the module has no stack of that name.
    """
    weight = stack_of(experts, name)
    if weight is None:
        raise InputError(f"{type(experts).__name__} has no stack {name[:80]!r}")
    if not hasattr(experts, "adapters"):
        experts.adapters = nn.ModuleDict()
    held = weight.codes if isinstance(weight, PackedWeight) else weight
    side = ("B" if name == "down_proj" else "A") if shared else ""
    adapter = ExpertAdapter(
        stack_shape(experts, name), rank=rank, scale=scale, shared=side, device=held.device
    )
    experts.adapters[name] = adapter
    experts.config._experts_implementation = IMPLEMENTATION
    return adapter


def stack_shape(experts: Any, name: str) -> tuple[int, int, int]:
    """Returns experts, outputs and inputs of a stack, in whichever order its module holds them."""
    weight = stack_of(experts, name)
    if weight is None:
        raise InputError(f"{type(experts).__name__} has no stack {name[:80]!r}")
    count, outputs, inputs = weight.shape
    if isinstance(weight, nn.Parameter) and experts.is_transposed:
        outputs, inputs = inputs, outputs
    return count, outputs, inputs


def packed_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes a layer of experts: [T, D] from hidden states [T, D], expert numbers int64[T, K] and
    their weights [T, K]. Registered with transformers as an experts implementation."""
    result = torch.zeros_like(hidden_states)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    adapters = getattr(experts, "adapters", {})
    loras = {name: one.matrices() for name, one in adapters.items() if one.enabled}
    for index, tokens, places in _assignments(top_k_index, experts.num_experts):
        inner = _product(experts, first, hidden_states[tokens], index, loras)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        outer = _product(experts, "down_proj", inner, index, loras)
        if experts.has_post_expert_norm:
            outer = experts.post_expert_norm(outer)
        outer = outer * top_k_weights[tokens, places, None]
        result.index_add_(0, tokens, outer.to(result.dtype))
    return result


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, packed_experts)


def _assignments(top_k_index: Tensor, experts: int) -> list[tuple[int, Tensor, Tensor]]:
    """Returns, for each expert that is chosen, its tokens and their places among their K, sorted by
    place and then by token. A number of E or above marks a place without an expert."""
    chosen = top_k_index.T.flatten()
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=experts)[:experts].tolist()
    found, at, tokens = [], 0, top_k_index.shape[0]
    for index, count in enumerate(counts):
        if count:
            mine = order[at : at + count]
            found.append((index, mine % tokens, mine // tokens))
        at += count
    return found


def _product(
    experts: Any,
    name: str,
    x: Tensor,
    index: int,
    loras: dict[str, Sequence[tuple[Tensor, Tensor]]],
) -> Tensor:
    weight = getattr(experts, name)
    if isinstance(weight, PackedWeight):
        result = packed_matmul(x, weight, index)
    elif experts.is_transposed:
        result = x @ weight[index].to(x.dtype)
    else:
        result = nn.functional.linear(x, weight[index].to(x.dtype))
    if experts.has_bias:
        result = result + getattr(experts, f"{name}_bias")[index].to(result.dtype)
    if name in loras:
        down, up = loras[name][index]
        lora = nn.functional.linear(nn.functional.linear(x, down.to(x.dtype)), up.to(x.dtype))
        result = result + lora * experts.adapters[name].scale
    return result
