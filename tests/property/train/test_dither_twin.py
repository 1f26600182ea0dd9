"""Dithered masters: every pattern of bits keeps its rounding, as exact fractions say it."""

import hashlib
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.train.dither import dither

DTYPES = {torch.bfloat16: 16, torch.float16: 13}
MASK = (1 << 64) - 1


def every_number(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def dithered(values, dtype, **settings):
    found = values.float().clone()
    dither(found, dtype, **{"seed": 3, "name": "w", **settings})
    return found


def slowly(held, index, dtype, seed=3, name="w"):
    """The twin: one number, in integers and exact fractions."""
    grid = DTYPES[dtype]
    key = hashlib.blake2b(f"dither {seed} {name}".encode(), digest_size=8).digest()
    mixed = (int.from_bytes(key, "little") + index * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    draw = (mixed ^ (mixed >> 31)) % (1 << grid)
    value = float(held)
    if value == 0 or not math.isfinite(value) or draw == 0:
        return value
    bits = held.view(torch.int16)
    inner = (Fraction(value) - Fraction(float((bits - 1).view(dtype)))) / 2
    beyond = float((bits + 1).view(dtype))
    outer = (Fraction(beyond) - Fraction(value)) / 2 if math.isfinite(beyond) else inner
    place = Fraction(value) - inner + (inner + outer) * Fraction(draw, 1 << grid)
    return float(torch.tensor(float(place), dtype=torch.float64).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_every_number_keeps_its_bits(dtype, seed):
    """Subnormal numbers, powers of two, the largest numbers, zeros, infinities and NaN too."""
    numbers = every_number(dtype)
    found = dithered(numbers, dtype, seed=seed)
    known = ~numbers.isnan()
    assert torch.equal(found.to(dtype).view(torch.int16)[known], numbers.view(torch.int16)[known])
    special = numbers.isnan() | numbers.isinf() | (numbers == 0)
    untouched = found.view(torch.int32) == numbers.float().view(torch.int32)
    assert untouched[special].all()
    assert (~untouched[~special]).float().mean() > 0.999


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_finds_the_same_masters(dtype):
    numbers = every_number(dtype)
    found = dithered(numbers, dtype)
    generator = torch.Generator().manual_seed(0)
    for index in torch.randint(len(numbers), (3000,), generator=generator).tolist():
        if not numbers[index].isnan():
            assert float(found[index]) == slowly(numbers[index], index, dtype), index


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_masters_are_uniform_in_their_intervals(dtype, step):
    """A power of two has half as much room below as above it."""
    inside = dithered(torch.full((1 << 18,), 1.5), dtype) - 1.5
    shares = torch.histc(inside / step, 16, -0.5, 0.5) / len(inside)
    assert (shares - 1 / 16).abs().max() < 0.003
    power = dithered(torch.full((1 << 18,), 1.0), dtype) - 1
    assert -step / 4 < power.min() < -step * 0.2499 / 1.01
    assert step * 0.499 / 1.01 < power.max() < step / 2
    assert abs((power < 0).float().mean() - 1 / 3) < 0.005


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)),
            st.tuples(*[st.integers(0, size - 1) for size in shape]),
            st.tuples(*[st.integers(1, 5) for _ in shape]),
        )
    )
)
def test_a_box_of_a_tensor_gets_the_values_of_the_whole(case):
    shape, first, sizes = case
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = dithered(numbers, torch.bfloat16)
    box = tuple(slice(a, a + n) for a, n in zip(first, sizes, strict=True))
    part = numbers[box].float().contiguous()
    dither(part, torch.bfloat16, seed=3, name="w", shape=shape, offset=first)
    assert torch.equal(part, whole[box])


def test_long_tensors_are_dithered_chunk_by_chunk(monkeypatch):
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = dithered(numbers, torch.bfloat16)
    monkeypatch.setattr("deltawire.train.dither._CHUNK_ON_CPU", 7)
    assert torch.equal(dithered(numbers, torch.bfloat16), whole)


def test_seed_and_name_decide():
    numbers = torch.full((64,), 1.5)
    found = [
        dithered(numbers, torch.bfloat16, seed=seed, name=name)
        for seed, name in ((1, "a"), (2, "a"), (1, "b"), (1, "a"))
    ]
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_what_is_known_more_exactly_is_left_alone():
    values = torch.tensor([1.0 + 2**-20, 0.1, -3.0000002])
    assert torch.equal(dithered(values, torch.bfloat16), values)
    assert torch.equal(dithered(torch.tensor([1.5]), torch.float32), torch.tensor([1.5]))
