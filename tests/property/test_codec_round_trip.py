"""Any bits, any density: back to the bit, equal to the reference, never larger than promised."""

import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import _native, codec
from deltawire.codec.delta import layout_of
from deltawire.codec.reference import decode_patch_reference, encode_reference
from deltawire.errors import CorruptError

ODD = {
    1: [0x80, 0x7F, 0xFF],
    2: [0x8000, 0x7FC1, 0xFFFF, 0x7F80],
    4: [0x80000000, 0x7FC00001, 0xFFFFFFFF],
    8: [1 << 63, 0x7FF8000000000001, 2**64 - 1],
}
"""Negative zero, a NaN with a payload, all ones, infinity: what a float comparison would lose."""


DTYPES = {
    1: ["U8", "F8_E4M3", "F8_E5M2"],
    2: ["U16", "F16", "BF16"],
    4: ["I32", "F32"],
    8: ["I64", "F64"],
}


@st.composite
def weights(draw):
    """A bf16 base and what an optimizer step makes of it: small weights move often, by little."""
    count = draw(st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    wide = rng.normal(0, 0.02, count).astype(np.float32)
    moved = wide + draw(st.sampled_from([1e-6, 1e-4, 1e-2])) * rng.choice([-1, 1], count)
    base, target = ((x.astype(np.float32).view(np.uint32) >> 16) for x in (wide, moved))
    return base.astype(np.uint16), target.astype(np.uint16), "BF16"


@st.composite
def pairs(draw):
    """A base and a target, uint[COUNT] both, and the dtype that they are bits of."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    name = draw(st.sampled_from(DTYPES[itemsize]))
    count = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000)))
    density = draw(st.one_of(st.sampled_from([0.0, 0.001, 0.01, 1.0]), st.floats(0, 1)))
    spread = draw(st.sampled_from([2, 50, 256]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = np.dtype(f"u{itemsize}")
    base = np.frombuffer(rng.bytes(count * itemsize), dtype).copy()
    fresh = np.frombuffer((rng.integers(0, spread, count * itemsize)).astype(np.uint8), dtype)
    odd = rng.random(count) < 0.1
    fresh = np.where(odd, rng.choice(np.array(ODD[itemsize], dtype), count), fresh).astype(dtype)
    return base, np.where(rng.random(count) < density, fresh, base), name


@settings(deadline=None, max_examples=150)
@given(st.one_of(pairs(), weights()))
def test_delta_round_trip(both):
    base, target, name = both
    before = base.copy()
    payload = codec.encode(base, target, dtype=name)
    assert len(payload) <= target.nbytes + 64
    assert np.array_equal(codec.decode(payload, base), target)
    patch = codec.decode_patch(payload, base)
    assert np.array_equal(patch.positions, np.flatnonzero(base != target))
    back = codec.undo(patch, base)
    codec.apply(patch, base)
    assert np.array_equal(base, target)
    codec.apply(back, base)
    assert np.array_equal(base, before)


@settings(deadline=None, max_examples=100)
@given(st.one_of(pairs(), weights()))
def test_delta_equals_reference(both):
    base, target, name = both
    payload = codec.encode(base, target, dtype=name)
    assert payload == encode_reference(base, target, layout_of(name))
    fast, slow = codec.decode_patch(payload, base), decode_patch_reference(payload, base)
    assert np.array_equal(fast.positions, slow.positions)
    assert np.array_equal(fast.bits, slow.bits)
    assert fast.bits.dtype == slow.bits.dtype


@settings(deadline=None, max_examples=50)
@given(st.one_of(pairs(), weights()))
def test_every_instruction_set_makes_the_same_bytes(both):
    base, target, name = both
    payloads = []
    for simd in ("portable", "avx2", "avx512"):
        with mock.patch.dict(os.environ, DELTAWIRE_SIMD=simd):
            payloads.append(codec.encode(base, target, dtype=name))
            assert np.array_equal(codec.decode(payloads[0], base), target)
    assert len(set(payloads)) == 1


def test_several_blocks():
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, 2 * _native.BLOCK + 77).astype(np.float32).view(np.uint32) >> 16
    base = base.astype(np.uint16)
    target = np.where(rng.random(base.size) < 0.02, base + 1, base).astype(np.uint16)
    payload = codec.encode(base, target, dtype="BF16")
    assert 8 * len(payload) < 9 * np.count_nonzero(base != target)
    assert np.array_equal(codec.decode(payload, base), target)


@settings(deadline=None, max_examples=100)
@given(st.one_of(pairs(), weights()))
def test_anchor_round_trip(both):
    for bits in both[:2]:
        payload = codec.encode_full(bits)
        assert len(payload) <= bits.nbytes + 64
        decoded = codec.decode_full(payload, bits.size, bits.dtype.itemsize)
        assert decoded.dtype == bits.dtype
        assert np.array_equal(decoded, bits)


@settings(deadline=None, max_examples=200)
@given(st.one_of(pairs(), weights()), st.data())
def test_damage_is_corrupt_or_in_bounds(both, data):
    base, target, name = both
    payload = bytearray(codec.encode(base, target, dtype=name))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        patch = codec.decode_patch(payload, base)
    except CorruptError:
        return
    assert (np.diff(patch.positions) > 0).all()
    codec.apply(patch, base)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 100))
def test_noise_is_corrupt(noise, count):
    with pytest.raises(CorruptError):
        codec.decode_patch(noise, np.zeros(count, np.uint16))
    with pytest.raises(CorruptError):
        codec.decode_full(noise, count, 2)
