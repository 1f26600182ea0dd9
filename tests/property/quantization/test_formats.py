"""Packed formats: kernels against their twin, and what packing keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import _native
from deltawire.errors import CorruptError, InputError
from deltawire.packed_formats import PACKED
from deltawire.quantization.dequantize import (
    dequantize,
    dequantize_with_torch,
    relative_error,
    requantize,
)
from deltawire.quantization.formats import ROWS, open_format

NAMES = sorted(PACKED)
# Of Gaussian weights: the first four are figures of the literature, computed again here.
ERRORS = {"int4-g32": 0.097, "mxfp4": 0.114, "nvfp4": 0.095, "fp8-block": 0.026, "int8-row": 0.0085}


@st.composite
def weights(draw):
    """Weights of any scale, with blocks of zeros, and columns of whole groups."""
    stack = draw(st.sampled_from([(), (1,), (3,)]))
    rows, groups = draw(st.integers(1, 150)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.randint(-100, 30, (*stack, rows, groups), generator=generator)
    if draw(st.booleans()):
        exponents = exponents.clamp(-8, -4)
    values = torch.randn(*stack, rows, groups, 32, generator=generator)
    values = torch.ldexp(values, exponents[..., None])
    values[torch.rand(exponents.shape, generator=generator) < 0.2] = 0
    return values.flatten(-2)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(weight=weights())
def test_the_kernel_writes_what_pytorch_computes(name, weight):
    form = open_format(name)
    parts = form.quantize(weight)
    form.check(parts, tuple(weight.shape))
    twin = dequantize_with_torch(form, parts)
    assert twin.shape == weight.shape
    assert torch.equal(dequantize(form, parts).view(torch.int16), twin.view(torch.int16))


@pytest.mark.parametrize("simd", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("name", NAMES)
def test_all_codes_and_odd_scales_on_each_vector_path(name, simd, monkeypatch):
    """Every code times scales that overflow, underflow and are no numbers."""
    monkeypatch.setenv("DELTAWIRE_SIMD", simd)
    form = open_format(name)
    wide = form.block[1] or 256
    scales = torch.tensor([1.0, -3.14159, 0.0, 1e-40, 3.3e38, torch.inf, torch.nan, 2.0**-126])
    codes = torch.arange(len(scales) * wide * form.bits // 8) * 37 % 256
    codes = codes.to(torch.uint8)
    found = np.empty(len(scales) * wide, np.uint16)
    values = form.values.numpy()
    if form.bits == 4:
        _native.dequantize4(codes.numpy(), values, scales.numpy(), found, 2)
        decoded = torch.stack([codes & 15, codes >> 4], -1).flatten()
    else:
        _native.dequantize8(codes.numpy(), values, scales.numpy(), wide, 1, wide, found, 2)
        decoded = codes
    exact = form.values[decoded.long()] * scales.repeat_interleave(wide)
    numbers = ~exact.isnan().numpy()
    assert np.array_equal(found == 0x7FC0, ~numbers)
    assert np.array_equal(
        found[numbers], exact.to(torch.bfloat16).view(torch.uint16).numpy()[numbers]
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_gaussian_weights(name):
    form = open_format(name)
    weight = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)) * 0.02
    assert relative_error(form, weight, form.quantize(weight)) == pytest.approx(
        ERRORS[name], rel=0.05
    )


@pytest.mark.parametrize("name", ["int4-g32", "int8-row", "mxfp4"])
@settings(deadline=None, max_examples=25)
@given(weight=weights())
def test_a_weight_on_the_grid_keeps_its_bits(name, weight):
    """A checkpoint that was dequantized to bf16 packs again to the same weights."""
    form = open_format(name)
    once = dequantize(form, form.quantize(weight.clamp(-1e3, 1e3).where(weight.abs() > 1e-6, 0)))
    assert torch.equal(dequantize(form, form.quantize(once)), once)


@pytest.mark.parametrize("name", NAMES)
def test_many_rows_are_packed_as_few_are(name):
    weight = torch.randn(2 * ROWS + 70, 128, generator=torch.Generator().manual_seed(5))
    form = open_format(name)
    found = form.quantize(weight)
    form.check(found, tuple(weight.shape))
    whole = form.quantize(weight[None])  # A stack is packed in one piece.
    assert all(torch.equal(one.float(), whole[key][0].float()) for key, one in found.items())


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e-2, 0.3, 30.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_weight_is_never_further_away_than_its_base_or_a_fresh_packing(name, size):
    form, generator = open_format(name), torch.Generator().manual_seed(3)
    base = form.quantize(torch.randn(2, 130, 192, generator=generator) * 0.02)
    if name == "int4-g32":
        base["codes"][0, :, ::5] &= 0xF0  # -8, which is never chosen here and may be stored
    old = dequantize(form, base).float()
    wanted = old + torch.randn(old.shape, generator=generator) * 0.02 * size
    found = requantize(form, wanted, base)
    form.check(found, tuple(old.shape))
    if not size:
        assert all(torch.equal(one.view(torch.uint8), base[key].view(torch.uint8))
                   for key, one in found.items())  # fmt: skip
    error, of_base, of_fresh = (
        form.block_sums((dequantize(form, parts).float() - wanted).double().square())
        for parts in (found, base, form.quantize(wanted))
    )
    if "global_scale" in base:  # A row decides together.
        of_fresh, error, of_base = (one.sum(-1) for one in (of_fresh, error, of_base))
    tolerance = 1 + 1e-5  # The choice is made in float32.
    assert bool((error <= of_base * tolerance).all())
    assert bool((error <= of_fresh * tolerance).all())


@pytest.mark.parametrize("name", [name for name in NAMES if open_format(name).bits == 4])
def test_columns_that_are_no_whole_groups_are_refused(name):
    with pytest.raises(InputError, match="multiple"):
        open_format(name).quantize(torch.zeros(4, 40))


@pytest.mark.parametrize("name", NAMES)
def test_damaged_parts_are_refused(name):
    form = open_format(name)
    parts = form.quantize(torch.randn(2, 128, 128))
    for change in (
        {"codes": parts["codes"][..., :-1]},
        {"scales": parts["scales"].double()},
        {"scales": parts["scales"][:1]},
        {"extra": parts["codes"]},
    ):
        with pytest.raises(CorruptError):
            form.check({**parts, **change}, (2, 128, 128))
    odd = parts["scales"].clone()
    odd.view(torch.uint8)[0, 0] = 255  # NaN in each of the formats
    with pytest.raises(CorruptError, match="not finite"):
        form.check({**parts, "scales": odd}, (2, 128, 128))


def test_codes_that_are_no_numbers_are_refused():
    form = open_format("fp8-block")
    parts = form.quantize(torch.randn(128, 128))
    parts["codes"][5, 6] = 255
    with pytest.raises(CorruptError, match="not a number"):
        form.check(parts, (128, 128))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_refused(bad):
    weight = torch.ones(32, 32)
    weight[3, 4] = bad
    with pytest.raises(InputError, match="not finite"):
        open_format("mxfp4").quantize(weight)


def test_an_unknown_format_is_named():
    with pytest.raises(InputError, match=r"'int3'.*int4-g32"):
        open_format("int3")


def test_sizes_that_do_not_fit_are_refused_by_the_kernels():
    codes, values, scales = (np.zeros(n, t) for n, t in ((16, "u1"), (16, "f4"), (1, "f4")))
    with pytest.raises(ValueError, match="do not fit"):
        _native.dequantize4(codes, values, scales, np.zeros(31, np.uint16), 1)
    with pytest.raises(ValueError, match="do not fit"):
        _native.dequantize4(codes, values[:8], scales, np.zeros(32, np.uint16), 1)
    with pytest.raises(ValueError, match="do not fit"):
        _native.dequantize8(codes, values, scales, 4, 1, 4, np.zeros(16, np.uint16), 1)
    wide = np.zeros(256, np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        _native.dequantize8(codes, wide, scales, 4, 0, 4, np.zeros(16, np.uint16), 1)
    with pytest.raises(ValueError, match="do not fit"):
        _native.dequantize8(codes, wide, scales, 0, 1, 4, np.zeros(16, np.uint16), 1)
