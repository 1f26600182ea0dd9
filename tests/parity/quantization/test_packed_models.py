"""Models over packed weights against the same models over the dequantized weights, to the bit.

The reference is transformers' own eager implementation of each family.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from packed_stacks import quantize_stack
from torch import nn

from deltawire.errors import CorruptError, InputError
from deltawire.packed_formats import PACKED
from deltawire.quantization.experts import (
    STACKS,
    add_expert_adapter,
    find_experts,
    replace_stacks,
)
from deltawire.quantization.formats import open_format
from deltawire.quantization.linear import PackedLinear, PackedWeight, packed_matmul

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8},
    ),
    "gpt_oss": (transformers.GptOssConfig, {"intermediate_size": 64, "num_local_experts": 8}),
    "mixtral": (transformers.MixtralConfig, {"intermediate_size": 96, "num_local_experts": 8}),
}


def build(family: str, dtype: torch.dtype):
    config, sizes = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, **sizes), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.05, generator=generator)
    model.config._experts_implementation = "eager"
    return model


def pair(family: str, form: str, dtype: torch.dtype):
    """A model over dequantized stacks, and the same model over packed ones."""
    plain = build(family, dtype)
    packed = copy.deepcopy(plain)
    for name, experts in find_experts(packed).items():
        stacks = {one: getattr(experts, one).detach() for one in STACKS if hasattr(experts, one)}
        replace_stacks(experts, form)
        for one, stack in stacks.items():
            quantize_stack(experts, getattr(experts, one), stack)
            held = getattr(experts, one).dequantized()
            held = held.transpose(1, 2) if experts.is_transposed else held
            plain.get_submodule(name).get_parameter(one).data.copy_(held)
    return plain, packed


def gradients(model):
    """Logits, and the gradients of what lies above and below the experts."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    upstream = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and any(part in name for part in ("embed_tokens", "q_proj", "gate.weight", "router.weight"))
    }
    for parameter in upstream.values():
        parameter.requires_grad_(True)
    ids = torch.randint(0, 128, (2, 19), generator=torch.Generator().manual_seed(1))
    logits = model(ids).logits
    logits.float().square().mean().backward()
    return {"logits": logits.detach()} | {name: one.grad for name, one in upstream.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", sorted(PACKED))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_outputs_and_gradients_equal_those_over_dequantized_weights(family, form, dtype):
    plain, packed = pair(family, form, dtype)
    expected, found = gradients(plain), gradients(packed)
    assert expected.keys() == found.keys()
    assert len(found) > 4
    assert any(
        one.abs().max() > 0 for name, one in found.items() if "gate" in name or "router" in name
    )
    for name, one in expected.items():
        if family == "gpt_oss" and dtype == torch.float32:
            # The library multiplies by the transposed stack there, and adds in another order.
            assert torch.allclose(one, found[name], rtol=1e-4, atol=1e-7), name
        else:
            assert torch.equal(one, found[name]), name


class PlainWeight(PackedWeight):
    """A weight in bf16, in the place of a packed one: the slow twin of adapters."""

    def __init__(self, values: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.values = values

    def dequantized(self, index=None):
        return self.values if index is None else self.values[index]

    def parts(self, index=None):
        return {"codes": self.dequantized(index)}


@pytest.mark.parametrize("shared", [False, True])
def test_adapter_gradients_equal_those_over_dequantized_weights(shared):
    _, packed = pair("qwen3_moe", "int4-g32", torch.bfloat16)
    for parameter in packed.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(3)
    for experts in find_experts(packed).values():
        for one in ("gate_up_proj", "down_proj"):
            adapter = add_expert_adapter(experts, one, rank=4, scale=2.0, shared=shared)
            adapter.lora_B.data.normal_(0, 0.02)
    plain = copy.deepcopy(packed)
    for experts in find_experts(plain).values():
        for one in ("gate_up_proj", "down_proj"):
            held = getattr(experts, one).dequantized()
            delattr(experts, one)
            setattr(experts, one, PlainWeight(held))
    ids = torch.randint(0, 128, (2, 19), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (packed, plain):
        model(ids).logits.float().square().mean().backward()
        found.append(
            {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        )
    assert len(found[0]) == 8
    for name, grad in found[0].items():
        assert grad.abs().max() > 0, name
        assert torch.equal(grad, found[1][name]), name


def test_an_adapter_is_the_low_rank_change_that_it_says():
    """Against a loop in double precision over the experts' merged matrices."""
    plain, packed = pair("qwen3_moe", "mxfp4", torch.float32)
    for name, experts in find_experts(packed).items():
        for one in ("gate_up_proj", "down_proj"):
            adapter = add_expert_adapter(experts, one, rank=4, scale=0.5)
            adapter.lora_B.data.normal_(0, 1.0)
            change = 0.5 * torch.bmm(adapter.lora_B.double(), adapter.lora_A.double())
            stack = plain.get_submodule(name).get_parameter(one)
            stack.data.copy_(stack.double() + change)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        merged = plain(ids).logits
        assert torch.allclose(packed(ids).logits, merged, atol=1e-4)
        for experts in find_experts(packed).values():
            for adapter in experts.adapters.values():
                adapter.enabled = False
        assert not torch.allclose(packed(ids).logits, merged, atol=1e-4)


@pytest.mark.parametrize("form", sorted(PACKED))
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_a_linear_layer_equals_one_over_the_dequantized_weight(form, shape):
    generator = torch.Generator().manual_seed(0)
    weight = PackedWeight(form, (48, 64))
    weight.set(open_format(form).quantize(torch.randn(48, 64, generator=generator)))
    layer = PackedLinear(weight, torch.randn(48, generator=generator).bfloat16())
    plain = nn.Linear(64, 48, dtype=torch.bfloat16)
    plain.weight = nn.Parameter(weight.dequantized(), requires_grad=False)
    plain.bias = nn.Parameter(torch.zeros(48, dtype=torch.bfloat16), requires_grad=False)
    inputs = [torch.randn(shape, generator=generator).bfloat16()]
    inputs.append(inputs[0].clone())
    outputs = [layer(inputs[0].requires_grad_()), plain(inputs[1].requires_grad_()) + layer.bias]
    for output in outputs:
        output.float().square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_nothing_dequantized_is_kept_for_the_backward_pass():
    weight = PackedWeight("int4-g32", (256, 256))
    weight.set(open_format("int4-g32").quantize(torch.randn(256, 256)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda x: x):
        packed_matmul(torch.randn(4, 256, requires_grad=True), weight).sum()
    assert not [one for one in kept if one.numel() >= 256 * 256]


def test_packed_weights_are_a_quarter_of_bf16():
    packed = PackedWeight("int4-g32", (8, 256, 512))
    held = sum(one.numel() * one.element_size() for one in packed.parameters())
    assert 2 * 8 * 256 * 512 / held > 3.5
    assert all(one.dtype == torch.uint8 and not one.requires_grad for one in packed.parameters())


def test_stacks_of_another_shape_are_refused():
    weight = PackedWeight("int4-g32", (4, 64, 128))
    with pytest.raises(CorruptError, match="another grid"):
        weight.set_matrix(0, weight.form.quantize(torch.randn(128, 64)))
    model = build("mixtral", torch.float32)
    experts = next(iter(find_experts(model).values()))
    with pytest.raises(InputError, match="no stack"):
        add_expert_adapter(experts, "up_proj", rank=4, scale=1.0)
