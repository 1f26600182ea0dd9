"""Quantized exports: which tensors they have, what keeps a scale, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from deltawire import codec
from deltawire.config import BuildConfig
from deltawire.config.exporters import quantizing
from deltawire.errors import InputError
from deltawire.export.quantized import serve_quantized
from deltawire.export.source import bits_of, digest_of, open_source
from deltawire.placement.live import module_tensors
from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.formats import open_format
from deltawire.quantization.sticky import RANGES, quantize_sticky
from deltawire.sync.follow.mirror import Mirror
from deltawire.train.build import build_model

SIZES = {"hidden_size": 128, "layers": 1, "head_size": 32, "feed_forward_size": 128, "context": 64}


def model_of(**sizes):
    return build_model(BuildConfig(**SIZES | {"family": "qwen3"} | sizes), seed=0)


def experts_of(size):
    sizes = {"experts": 2, "experts_per_token": 1, "feed_forward_size": size}
    return model_of(family="qwen3_moe", **sizes)


def test_deepseeks_layout():
    specs = {one.name: one for one in open_source("fp8-block", model_of()).specs()}
    name = "model.layers.0.mlp.gate_proj.weight"
    assert (specs[name].shape, specs[name].dtype) == ((128, 128), "F8_E4M3")
    scale = specs[f"{name}_scale_inv"]
    assert (scale.shape, scale.dtype) == ((1, 1), "F32")
    rest = {one.dtype for key, one in specs.items() if "proj" not in key}
    assert rest == {"BF16"}


def test_experts_have_the_names_and_halves_of_checkpoints():
    model = experts_of(128)
    source = open_source("fp8-block", model)
    tensors = source.tensors()
    stack = dict(model.named_parameters())["model.layers.0.mlp.experts.gate_up_proj"]
    form = open_format("fp8-block")
    for half, name in enumerate(("gate_proj", "up_proj")):
        stored = f"model.layers.0.mlp.experts.1.{name}.weight"
        parts = {
            "codes": tensors[stored].view(torch.uint8),
            "scales": tensors[f"{stored}_scale_inv"],
        }
        exact = stack.detach()[1, half * 128 : (half + 1) * 128].bfloat16().float()
        error = (dequantize(form, parts).float() - exact).norm() / exact.norm()
        assert 0 < error < 0.04
    assert "model.layers.0.mlp.gate" in source.quantization_config["modules_to_not_convert"]
    assert "model.layers.0.mlp.gate.weight" in tensors


def test_powers_of_two_hold_the_peak_and_nothing_larger_does():
    form = open_format("fp8-block")
    for peak in (448.0, 448.5, 449.0, 0.02, 1.0, 3.5, 2.0**-100):
        weight = torch.full((2, 3), peak).bfloat16()
        scale = float(quantize_sticky(form, weight, None, power_of_two=True)["scales"])
        assert scale * 448 >= float(weight[0, 0]) > scale * 224
        assert torch.frexp(torch.tensor(scale))[0] == 0.5


@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_scale_is_kept_while_the_peak_is_in_its_range(name):
    form, (low, high) = open_format(name), RANGES[name]
    weight = torch.zeros(1, 128)
    weight[0, 5] = 1.0
    held = quantize_sticky(form, weight, None)["scales"]
    factor = float(form.float_scales({"scales": held}).flatten()[0])
    for ratio, kept in ((low, True), (low * 0.98, False), (high * 0.99, True), (high, False)):
        moved = weight * (ratio * factor)
        scales = quantize_sticky(form, moved, held)["scales"]
        assert torch.equal(scales.view(torch.uint8), held.view(torch.uint8)) == kept, ratio
        again = quantize_sticky(form, moved, scales)["scales"]
        assert torch.equal(again, scales)
    zeros = quantize_sticky(form, torch.zeros(1, 128), held)
    assert torch.equal(zeros["scales"], held)
    assert torch.equal(dequantize(form, zeros), torch.zeros(1, 128).bfloat16())


def test_a_peak_that_rounds_to_a_smaller_code_gets_a_new_scale():
    """6.5 rounds to 6, which would not keep the scale: reading the version would change it."""
    form = open_format("int4-g32")
    weight = torch.zeros(1, 32)
    weight[0, 5] = 7.0
    held = quantize_sticky(form, weight, None)["scales"]
    parts = quantize_sticky(form, weight * (6.5 / 7.0), held)
    again = quantize_sticky(form, dequantize(form, parts), parts["scales"])
    assert torch.equal(again["scales"], parts["scales"])


@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_block_of_zeros_has_a_scale_that_later_weights_replace(name):
    form = open_format(name)
    empty = quantize_sticky(form, torch.zeros(2, 64), None)
    assert bool((form.float_scales(empty) == 1).all())
    weight = torch.full((2, 64), 1e-3)
    parts = quantize_sticky(form, weight, empty["scales"])
    assert torch.allclose(dequantize(form, parts).float(), weight, rtol=0.1)


@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_weight_that_crosses_zero_changes_no_code(name):
    form = open_format(name)
    weight = torch.full((1, 64), 1.0)
    weight[0, 3] = 1e-6
    parts = quantize_sticky(form, weight, None)
    weight[0, 3] = -1e-6
    moved = quantize_sticky(form, weight, parts["scales"])
    assert torch.equal(parts["codes"], moved["codes"])


@pytest.mark.parametrize("exporter", quantizing())
def test_quantizing_what_was_dequantized_changes_nothing(exporter):
    model = model_of()
    source = open_source(exporter, model)
    digest = digest_of(source)
    source.write_served(model)
    assert digest_of(source) == digest


@pytest.mark.parametrize("exporter", ["int4-g32", "mxfp4"])
def test_columns_that_are_not_whole_groups_are_refused(exporter):
    with pytest.raises(InputError, match=r"down_proj.weight cannot be published as .*48 columns"):
        open_source(exporter, model_of(feed_forward_size=48))


def test_experts_whose_halves_share_a_block_are_refused():
    with pytest.raises(InputError, match=r"0.gate_proj.weight cannot be published as fp8-block"):
        open_source("fp8-block", experts_of(96))
    open_source("int4-g32", experts_of(96))


def test_a_weight_that_is_not_finite_is_named():
    model = model_of()
    with torch.no_grad():
        dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan
    with pytest.raises(InputError, match=r"up_proj.weight: a weight that is not finite"):
        open_source("mxfp4", model).tensors()


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(InputError, match="no linear layers or experts"):
        open_source("mxfp4", torch.nn.Sequential(torch.nn.Embedding(4, 32)))


@pytest.mark.parametrize("exporter", quantizing())
def test_a_version_in_bf16_gives_the_tensors_without_the_model(exporter):
    """Another thread may compute with the model meanwhile."""
    model = model_of()
    plain = open_source("bf16", model)
    bits = {name: one.reshape(-1) for name, one in bits_of(plain).items()}
    source = open_source(exporter, model)
    digest = digest_of(source)
    source._model = None
    shards = source.derived(Mirror(bits, 0, codec.ZERO))
    dtypes = {one.name: one.dtype for one in source.specs()}
    found = {name: codec.bits_of(one.bits, dtypes[name]) for name, one in shards.items()}
    assert codec.digest_model(found) == digest


def test_an_exporter_that_does_not_quantize_serves_the_model_as_it_is():
    model = model_of()
    names = module_tensors(model).keys()
    assert serve_quantized(model, "bf16") is model
    assert module_tensors(model).keys() == names
