"""The fused kernels of packed weights, on Triton's interpreter or a GPU, against their twin."""

from __future__ import annotations

import pytest
import torch

from deltawire.quantization import linear
from deltawire.quantization.dequantize import dequantize_with_torch
from deltawire.quantization.formats import FORMATS, open_format
from deltawire.quantization.fused import multiply_packed, multiply_with_torch
from deltawire.quantization.linear import PackedLinear, PackedWeight

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(name, shape, count, *, dtype=torch.float32, transposed=True):
    """Parts of a weight [R, C], and an input."""
    generator = torch.Generator().manual_seed(0)
    form = open_format(name)
    parts = form.quantize(torch.randn(shape, generator=generator) * 0.02)
    x = torch.randn(count, shape[1] if transposed else shape[0], generator=generator)
    return form, {key: one.to(DEVICE) for key, one in parts.items()}, x.to(DEVICE, dtype)


def bound(form, parts, x, *, transposed):
    """By how much two sums of the same products in float32 may differ, and their rounding."""
    weight = dequantize_with_torch(form, parts).double().abs()
    sizes = x.double().abs() @ (weight.T if transposed else weight)
    rounding = 2.0**-8 if x.dtype == torch.bfloat16 else 0.0
    return sizes * (x.shape[-1] * 2.0**-23 + rounding)


@pytest.mark.parametrize("transposed", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(70, 96), (130, 192)])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_kernel_multiplies_as_pytorch_does(name, shape, dtype, transposed):
    form, parts, x = drawn(name, shape, 5, dtype=dtype, transposed=transposed)
    found = multiply_packed(form, parts, x, transposed=transposed)
    twin = multiply_with_torch(form, parts, x, transposed=transposed)
    assert found.dtype == twin.dtype == dtype
    assert found.shape == twin.shape
    difference = (found.double() - twin.double()).abs()
    assert bool((difference <= bound(form, parts, x, transposed=transposed)).all())


def test_more_rows_than_a_tile_holds_and_none():
    form, parts, x = drawn("int4-g32", (64, 64), 33)
    found = multiply_packed(form, parts, x.view(3, 11, 64), transposed=True)
    twin = multiply_with_torch(form, parts, x, transposed=True).view(3, 11, 64)
    assert bool(((found - twin).abs().view(33, 64) <= bound(form, parts, x, transposed=True)).all())
    assert multiply_packed(form, parts, x[:0], transposed=True).shape == (0, 64)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_layer_that_is_fused_has_the_gradient_of_one_that_is_not(name, monkeypatch):
    form, parts, x = drawn(name, (64, 96), 4)
    exact, fused = (PackedLinear(PackedWeight(name, (64, 96), device=DEVICE)) for _ in range(2))
    for layer in (exact, fused):
        layer.weight.set(parts)
    fused.weight.fused = True
    calls = []

    def counted(*given, **options):
        calls.append(options["transposed"])
        return multiply_packed(*given, **options)

    monkeypatch.setattr(linear, "is_fused", lambda _: True)  # as on a GPU
    monkeypatch.setattr(linear, "multiply_packed", counted)
    results, gradients = [], []
    given = torch.linspace(-1, 1, 4 * 64, device=DEVICE).view(4, 64)
    for layer in (exact, fused):
        leaf = x.clone().requires_grad_()
        results.append(layer(leaf))
        results[-1].backward(given)
        gradients.append(leaf.grad)
    assert calls == [True, False], "only the fused layer, forward and backward"
    apart = (results[0] - results[1]).abs()
    assert bool((apart <= bound(form, parts, x, transposed=True)).all())
    apart = (gradients[0] - gradients[1]).abs()
    assert bool((apart <= bound(form, parts, given, transposed=False)).all())


def test_a_cpu_multiplies_by_the_dequantized_weight(monkeypatch):
    monkeypatch.setattr(linear, "multiply_packed", None)
    _, parts, x = drawn("mxfp4", (64, 96), 4)
    layer = PackedLinear(PackedWeight("mxfp4", (64, 96)))
    layer.weight.set({key: one.cpu() for key, one in parts.items()})
    layer.weight.fused = True
    expected = x.cpu() @ dequantize_with_torch(layer.weight.form, parts).float().cpu().T
    assert torch.equal(layer(x.cpu()), expected)
