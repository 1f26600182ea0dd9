"""``step_slowdown``: forward and backward of a layer of experts, packed and in bf16.

Both layers compute the same function: the bf16 one holds the dequantized weights and is
transformers' eager implementation. The weights are frozen in both; the gradient is that of the
hidden states and of the router's weights. The two take turns, and medians are compared.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.training.keys import Measured, Options
from deltawire.packed_formats import PACKED
from deltawire.quantization.experts import replace_stacks
from deltawire.quantization.linear import PackedWeight

EXPERTS, HIDDEN, INNER, CHOSEN, TOKENS = 128, 2048, 768, 8, 4096
SMALL = (8, 256, 128, 2, 64)
STACKS = ("gate_up_proj", "down_proj")


def measure(options: Options) -> Measured:
    """Time a layer of the stated size in int4, and compare gradients in every format."""
    equal, ratios = {}, {}
    for form in PACKED:
        plain, packed = layers(form, *SMALL[:4], seed=options.seed)
        ratios[form] = ratio_at_size(form)
        data = inputs(*SMALL[:1], SMALL[1], SMALL[3], SMALL[4], seed=options.seed)
        equal[form] = same(step(plain, *data)[1], step(packed, *data)[1])
    plain, packed = layers("int4-g32", EXPERTS, HIDDEN, INNER, CHOSEN, seed=options.seed)
    data = inputs(EXPERTS, HIDDEN, CHOSEN, TOKENS, seed=options.seed)
    seconds: dict[str, list[float]] = {"bf16": [], "packed": []}
    cpu: dict[str, list[float]] = {"bf16": [], "packed": []}
    found: dict[str, list[Tensor]] = {}
    for _ in range(options.repeats + 1):  # The first of each warms up.
        for name, layer in (("bf16", plain), ("packed", packed)):
            before = time.process_time()
            spent, found[name] = step(layer, *data)
            seconds[name].append(spent)
            cpu[name].append(time.process_time() - before)
    equal["int4-g32, 2048 x 768"] = same(found["bf16"], found["packed"])
    medians = {name: statistics.median(one[1:]) for name, one in seconds.items()}
    ratios["int4-g32, measured"] = memory_ratio(plain, packed)
    slowdown = medians["packed"] / medians["bf16"]
    narrow = [ratio for form, ratio in ratios.items() if form not in ("fp8-block", "int8-row")]
    return Measured(
        {
            "expert_memory_ratio": round(min(narrow), 3),
            "gradient_equal": all(equal.values()),
            "step_slowdown": round(slowdown, 3),
        },
        {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "cpu_slowdown": round(cpu["packed"][-1] / cpu["bf16"][-1], 3),
            "threads": torch.get_num_threads(),
            "memory_ratios": ratios,
            "equal": equal,
        },
    )


def layers(form: str, experts: int, hidden: int, inner: int, chosen: int, *, seed: int) -> Any:
    """Returns a layer over dequantized bf16 weights, and the same one packed."""
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=chosen,
        dtype="bfloat16",
    )
    config._experts_implementation = "eager"
    make: Any = Qwen3MoeExperts
    with torch.device("meta"):
        plain = make(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        packed = make(copy.deepcopy(config))
    replace_stacks(packed, form)
    packed.to_empty(device="cpu")
    for name in STACKS:
        weight = getattr(packed, name)
        stack = torch.empty(weight.shape, dtype=torch.bfloat16)
        drawn = torch.randn(weight.shape[1:], generator=generator) * 0.02
        parts = weight.form.quantize(drawn)
        for index in range(experts):  # Each expert's codes are those of the first, shifted.
            moved = {**parts, "codes": parts["codes"].roll(index, -1)}
            weight.set_matrix(index, moved)
            stack[index] = weight.dequantized(index)
        setattr(plain, name, torch.nn.Parameter(stack, requires_grad=False))
    return plain, packed


def inputs(
    experts: int, hidden: int, chosen: int, tokens: int, *, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws hidden states [T, D], chosen experts [T, K] and their weights [T, K]."""
    generator = torch.Generator().manual_seed(seed + 1)
    states = torch.randn(tokens, hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, experts, generator=generator)
    weights, index = scores.softmax(-1).topk(chosen, -1)
    return states, index, weights.bfloat16()


def step(layer: Any, states: Tensor, index: Tensor, weights: Tensor) -> tuple[float, list[Tensor]]:
    """Computes forward and backward; returns the seconds, and outputs and gradients."""
    states, weights = states.clone().requires_grad_(), weights.clone().requires_grad_()
    started = time.perf_counter()
    result = layer(states, index, weights)
    result.backward(torch.ones_like(result))
    spent = time.perf_counter() - started
    return spent, [result.detach(), states.grad, weights.grad]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Returns whether all bits are equal."""
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def ratio_at_size(form: str) -> float:
    """Returns the bytes of the stated layer in bf16 over those in a format, by its layout."""
    shapes = [(EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)]
    stacks = [PackedWeight(form, shape, device="meta") for shape in shapes]
    packed = sum(one.nbytes for stack in stacks for one in stack.parameters())
    return 2 * sum(math.prod(shape) for shape in shapes) / packed


def memory_ratio(plain: Any, packed: Any) -> float:
    """Returns the bytes of a layer's weights over those of the packed one."""
    sizes = [sum(one.nbytes for one in layer.parameters()) for layer in (plain, packed)]
    return float(sizes[0] / sizes[1])
