"""Rows of a matrix on several ranks are packed to the bits that they have on one."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.quantization.formats import open_format
from deltawire.quantization.sticky import (
    RANGES,
    peaks_of_rows,
    quantize_rows,
    quantize_sticky,
)


def of_blocks(form, first, end):
    """The rows of blocks that rows ``first`` to ``end`` lie in."""
    high = form.block[0]
    return slice(first // high, -(-end // high))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(RANGES)),
    power_of_two=st.booleans(),
    rows=st.integers(1, 300),
    columns=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    seed=st.integers(0, 99),
    moved=st.sampled_from([0.0, 1e-3, 0.3, 10.0]),
)
def test_any_division_gives_the_bits_of_the_whole(
    name, power_of_two, rows, columns, cuts, seed, moved
):
    form = open_format(name)
    power_of_two = power_of_two and name == "fp8-block"
    random = np.random.default_rng(seed)
    shape = (rows, columns * 32)
    before = torch.from_numpy(random.normal(size=shape) * 0.02).bfloat16()
    after = (before.float() * (1 + moved * torch.from_numpy(random.random(shape)))).bfloat16()
    held = quantize_sticky(form, before, None, power_of_two=power_of_two)["scales"]
    whole = quantize_sticky(form, after, held, power_of_two=power_of_two)
    borders = sorted({0, rows, *(one for one in cuts if one < rows)})
    ranges = list(itertools.pairwise(borders))
    # The slow twin of the collective: each block's peak is the largest of its parts'.
    agreed = torch.zeros(form.grid(*shape))
    for first, end in ranges:
        part = agreed[of_blocks(form, first, end)]
        part.copy_(torch.maximum(part, peaks_of_rows(form, after[first:end], first)))
    codes, scales = [], []
    for first, end in ranges:
        blocks = of_blocks(form, first, end)
        parts = quantize_rows(
            form,
            after[first:end],
            first,
            held[blocks],
            power_of_two=power_of_two,
            peaks=agreed[blocks] if form.block[0] > 1 else None,
        )
        codes.append(parts["codes"])
        assert torch.equal(parts["scales"], whole["scales"][blocks])
        own = -(-first // form.block[0]) - first // form.block[0]
        scales.append(parts["scales"][own:])
    assert torch.equal(torch.cat(codes), whole["codes"])
    assert torch.equal(torch.cat(scales), whole["scales"]), "each scale has one owner"
