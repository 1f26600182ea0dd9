"""Any bits, any density: back to the bit, equal to the reference, never larger than promised."""

import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltawire import _native, codec
from deltawire.codec.delta import layout_of
from deltawire.codec.reference import (
    decode_full_reference,
    decode_patch_reference,
    encode_full_reference,
    encode_reference,
)
from deltawire.errors import CorruptError, InputError

ODD = {
    1: [0x80, 0x7F, 0xFF],
    2: [0x8000, 0x7FC1, 0xFFFF, 0x7F80],
    4: [0x80000000, 0x7FC00001, 0xFFFFFFFF],
    8: [1 << 63, 0x7FF8000000000001, 2**64 - 1],
}
"""Negative zero, a NaN with a payload, all ones, infinity: what a float comparison would lose."""


COLUMNS = st.sampled_from([0, 2, 7, 64, 500])
DTYPES = {
    1: ["U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E8M0"],
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


def large(count, density, seed, name="BF16"):
    """A base and a target of many elements, as an optimizer step would leave them."""
    rng = np.random.default_rng(seed)
    wide = rng.normal(0, 0.02, count).astype(np.float32)
    step = np.where(rng.random(count) < density, rng.normal(0, 1e-3, count), 0).astype(np.float32)
    if name == "F32":
        return wide.view(np.uint32), (wide + step).view(np.uint32)
    return tuple((x.view(np.uint32) >> 16).astype(np.uint16) for x in (wide, wide + step))


@settings(deadline=None, max_examples=150)
@given(st.one_of(pairs(), weights()), COLUMNS, st.sampled_from([1, 2]))
def test_delta_round_trip(both, columns, threads):
    base, target, name = both
    before = base.copy()
    payload = codec.encode(base, target, dtype=name, columns=columns, threads=threads)
    assert len(payload) <= target.nbytes + 20
    assert np.array_equal(codec.decode(payload, base, threads=threads), target)
    patch = codec.decode_patch(payload, base, threads=threads)
    assert np.array_equal(patch.positions, np.flatnonzero(base != target))
    back = codec.undo(patch, base)
    codec.apply(patch, base)
    assert np.array_equal(base, target)
    codec.apply(back, base)
    assert np.array_equal(base, before)
    assert codec.advance(payload, base) == len(patch)
    assert np.array_equal(base, target)


def check_delta(base, target, name, columns):
    """The twin codes decision by decision, 0.1 s for an example: `make drills` draws more."""
    payload = codec.encode(base, target, dtype=name, columns=columns)
    assert payload == encode_reference(base, target, layout_of(name), columns)
    fast, slow = codec.decode_patch(payload, base), decode_patch_reference(payload, base)
    assert np.array_equal(fast.positions, slow.positions)
    assert np.array_equal(fast.bits, slow.bits)
    assert fast.bits.dtype == slow.bits.dtype


@settings(deadline=None, max_examples=40)
@given(st.one_of(pairs(), weights()), COLUMNS)
@example((*large(2999, 0.3, 7), "BF16"), 64)
def test_delta_equals_reference(both, columns):
    check_delta(*both, columns)


@pytest.mark.drills
@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(st.one_of(pairs(), weights()), COLUMNS)
def test_many_changes_equal_the_reference(both, columns):
    check_delta(*both, columns)
    for bits in both[:2]:
        check_anchor(bits, both[2])


@settings(deadline=None, max_examples=50)
@given(st.one_of(pairs(), weights()), COLUMNS)
def test_every_instruction_set_makes_the_same_bytes(both, columns):
    check_instruction_sets(*both, columns)


def check_instruction_sets(base, target, name, columns):
    """Every path's delta and anchor, decoded by every path; returns them."""
    payloads, anchors = set(), set()
    for simd in ("portable", "avx2", "avx512"):
        with mock.patch.dict(os.environ, DELTAWIRE_SIMD=simd):
            payloads.add(codec.encode(base, target, dtype=name, columns=columns))
            anchors.add(codec.encode_full(target, name))
            assert np.array_equal(codec.decode(next(iter(payloads)), base), target)
            whole = codec.decode_full(next(iter(anchors)), target.size, target.itemsize)
            assert np.array_equal(whole, target)
    assert len(payloads) == len(anchors) == 1
    return payloads.pop(), anchors.pop()


@pytest.mark.parametrize("count", [4099, 1 << 15, (1 << 15) + 77, (1 << 20) + 65])
@pytest.mark.parametrize("density", [0.01, 0.6])
@pytest.mark.parametrize("name", ["BF16", "F32"])
def test_every_number_of_lanes_equals_the_reference(count, density, name):
    """One lane below 2**15 elements, where the reference codes decision by decision."""
    check_lanes(count, density, name)


def test_the_largest_payload_of_one_lane_equals_the_reference():
    check_lanes((1 << 15) - 1, 0.01, "BF16")


def check_lanes(count, density, name):
    base, target = large(count, density, count, name)
    payload, anchor = check_instruction_sets(base, target, name, 250)
    if density > 0.5 and count > 1 << 20:
        return  # The reference would take minutes.
    assert payload == encode_reference(base, target, layout_of(name), 250)
    slow = decode_patch_reference(payload, base)
    assert np.array_equal(slow.positions, np.flatnonzero(base != target))
    assert np.array_equal(slow.bits, target[slow.positions])
    if count < 1 << 20:
        assert anchor == encode_full_reference(target, name)
        assert np.array_equal(decode_full_reference(anchor, count, target.itemsize), target)


def check_anchor(bits, name):
    payload = codec.encode_full(bits, name)
    assert payload == encode_full_reference(bits, name)
    assert np.array_equal(decode_full_reference(payload, bits.size, bits.itemsize), bits)


@settings(deadline=None, max_examples=50)
@given(st.one_of(pairs(), weights()))
@example((*large(2999, 0.3, 7), "BF16"))  # Few that are drawn are as long.
def test_anchor_equals_reference(both):
    base, target, name = both
    for bits in (base, target):
        check_anchor(bits, name)


@settings(deadline=None, max_examples=50)
@given(st.one_of(pairs(), weights()), st.integers(0, 10**6))
def test_the_digest_gained_is_that_of_the_patch(both, start):
    base, target, name = both
    coded = codec.encode_named("w", base, target, start=start, dtype=name)
    patch, moved = codec.decode_named(coded.payload, "w", base, start=start, dtype=name)
    assert moved == coded.moved == codec.digest_patch("w", patch, base[patch.positions], start)
    assert coded.payload == codec.encode(base, target, dtype=name)
    assert coded.changed == np.count_nonzero(base != target)
    gained = codec.digest_bits("w", target, start) - codec.digest_bits("w", base, start)
    assert coded.moved == gained


def test_signs_that_follow_their_columns_cost_little():
    base = large(1 << 20, 0.0, 3)[0] & 0x7FFF  # Bits rise as values do.
    rng = np.random.default_rng(4)
    moved, falls = rng.random(base.size) < 0.03, rng.random(base.size) < 0.5
    by_column = np.where(np.arange(base.size) % 512 % 2, base + 1, base - 1)
    at_random = np.where(falls, base + 1, base - 1)
    sizes = [
        len(codec.encode(base, np.where(moved, to, base).astype("u2"), dtype="BF16", columns=512))
        for to in (by_column, at_random)
    ]
    assert 8 * (sizes[1] - sizes[0]) > 0.7 * np.count_nonzero(moved)


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


@given(st.lists(st.tuples(pairs(), COLUMNS, st.integers(0, 1 << 40)), max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_batch_equals_changes_encoded_one_by_one(drawn):
    for dtype in {name for (_, _, name), _, _ in drawn}:
        changes = [
            codec.ChangedRange(f"t{number}", base, target, start, columns)
            for number, ((base, target, name), columns, start) in enumerate(drawn)
            if name == dtype
        ]
        alone = [
            codec.encode_named(
                one.name,
                one.base_bits,
                one.target_bits,
                start=one.start,
                dtype=dtype,
                columns=one.columns,
            )
            for one in changes
        ]
        assert codec.encode_batch(changes, dtype=dtype) == alone


def test_a_batch_of_unequal_bits_is_refused():
    bits, wide = np.zeros(4, np.uint16), np.zeros(4, np.uint32)
    good = codec.ChangedRange("a", bits, bits, 0, 0)
    with pytest.raises(InputError, match="bits of 4 and of 2 bytes in one batch"):
        codec.encode_batch([good, codec.ChangedRange("b", wide, wide, 0, 0)], dtype="BF16")
    with pytest.raises(InputError):
        codec.encode_batch([codec.ChangedRange("a", bits, bits[:2], 0, 0)], dtype="BF16")
    assert codec.encode_batch([], dtype="BF16") == []
