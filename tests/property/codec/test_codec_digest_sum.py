"""The digest is a sum, and its native kernel is the NumPy one."""

import os
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import codec
from deltawire.codec.reference import digest_bits_reference, digest_rounded_reference
from deltawire.errors import InputError

names = st.text(max_size=30)
starts = st.one_of(st.integers(0, 100), st.integers(0, 2**40))


@st.composite
def arrays(draw):
    """Bits of any width, uint[N], at any alignment of whole elements."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.one_of(st.integers(0, 40), st.integers(0, 2000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = np.frombuffer(rng.bytes((count + 9) * itemsize), f"u{itemsize}")
    offset = draw(st.integers(0, 9))
    return bits[offset : offset + count]


@settings(deadline=None)
@given(names, arrays(), starts)
def test_native_equals_reference(name, bits, start):
    assert codec.digest_bits(name, bits, start) == digest_bits_reference(name, bits, start)


@settings(deadline=None)
@given(names, arrays(), starts, st.data())
def test_digest_adds_up_over_pieces(name, bits, start, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, bits.size), max_size=5)))
    total = codec.ZERO
    for first, last in zip([0, *cuts], [*cuts, bits.size], strict=True):
        total += codec.digest_bits(name, bits[first:last], start + first)
    assert total == codec.digest_bits(name, bits, start)


@settings(deadline=None)
@given(names, arrays(), starts, st.data())
def test_patch_moves_the_digest(name, bits, start, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    positions = np.flatnonzero(rng.random(bits.size) < 0.3)
    new = np.frombuffer(rng.bytes(positions.size * bits.dtype.itemsize), bits.dtype)
    patch = codec.Patch(positions, new)
    target = bits.copy()
    codec.apply(patch, target)
    change = codec.digest_patch(name, patch, bits[positions], start)
    before, after = (codec.digest_bits(name, copy, start) for copy in (bits, target))
    assert before + change == after
    back = codec.digest_patch(name, codec.undo(patch, bits), new, start)
    assert change + back == codec.ZERO


@st.composite
def floats(draw):
    """float32[N] of any bits that are numbers, at any alignment: also subnormal ones, infinities,
    and those halfway between two neighbors of bf16."""
    count = draw(st.one_of(st.integers(0, 40), st.integers(0, 2000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = rng.integers(0, 2**32, count + 9, np.uint32)
    halfway = rng.random(bits.size) < 0.2
    bits[halfway] = bits[halfway] & 0xFFFF0000 | 0x8000
    bits[rng.random(bits.size) < 0.1] &= 0x807FFFFF
    bits[rng.random(bits.size) < 0.05] = 0x7F800000
    bits[rng.random(bits.size) < 0.05] = 0x7F7FFFFF  # Rounds to infinity.
    bits[(bits & 0x7FFFFFFF) > 0x7F800000] = 0
    offset = draw(st.integers(0, 9))
    return bits.view(np.float32)[offset : offset + count]


@pytest.mark.parametrize("simd", ["portable", "avx2", "avx512"])
@settings(deadline=None)
@given(name=names, values=floats(), start=starts)
def test_rounding_and_digesting_in_one_pass_equals_torch_and_the_reference(
    simd, name, values, start
):
    rounded = torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
    with mock.patch.dict(os.environ, DELTAWIRE_SIMD=simd):
        found = codec.digest_rounded(name, values, start)
    assert found == codec.digest_bits(name, rounded, start)
    assert found == digest_rounded_reference(name, values, start)


@pytest.mark.parametrize("simd", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("odd", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_what_is_no_number_is_not_rounded_here(monkeypatch, simd, odd):
    monkeypatch.setenv("DELTAWIRE_SIMD", simd)
    for place in (0, 7, 31, 33, 36):
        bits = np.ones(37, np.uint32)
        bits[place] = odd
        assert codec.digest_rounded("w", bits.view(np.float32)) is None
    for wrong in (np.zeros(3), np.zeros((3, 3), np.float32), np.zeros(6, np.float32)[::2]):
        with pytest.raises(InputError, match="float32"):
            codec.digest_rounded("w", wrong)
