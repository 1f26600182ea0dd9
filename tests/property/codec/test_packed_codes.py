"""4-bit codes: back to the bit, equal to the reference, smaller where codes change one by one."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import codec
from deltawire.codec import packed
from deltawire.codec.delta import HEADER
from deltawire.codec.packed import E2M1, INTEGERS
from deltawire.codec.reference import (
    decode_packed_reference,
    encode_packed_reference,
    small_numbers,
)
from deltawire.errors import CorruptError

NAMES = {4: "q_proj.weight_packed", 1: "q_proj.weight_packed"}
DTYPES = {4: "I32", 1: "U8"}


def moved(count, itemsize, density, seed, *, step=1):
    """Elements of random codes, and what moving a share of the codes by ``step`` makes of them."""
    rng = np.random.default_rng(seed)
    codes = np.clip(rng.normal(8, 2.5, 2 * itemsize * count), 0, 15).astype(np.uint8)
    ways = rng.choice([-step, step], codes.size)
    fresh = np.clip(codes.astype(int) + ways, 0, 15).astype(np.uint8)
    fresh = np.where(rng.random(codes.size) < density, fresh, codes)
    return tuple(
        (one[0::2] | one[1::2] << 4).astype(np.uint8).view(f"u{itemsize}") for one in (codes, fresh)
    )


@st.composite
def pairs(draw):
    """A base and a target, uint[COUNT] both, of any codes."""
    itemsize = draw(st.sampled_from([1, 4]))
    count = draw(st.one_of(st.integers(0, 20), st.integers(0, 500)))
    density = draw(st.sampled_from([0.0, 0.002, 0.05, 1.0]))
    seed = draw(st.integers(0, 2**32))
    return moved(count, itemsize, density, seed, step=draw(st.sampled_from([1, 9])))


@settings(deadline=None, max_examples=80)
@given(pairs(), st.sampled_from([0, 1, 3, 60]), st.sampled_from([INTEGERS, E2M1]))
def test_codes_come_back_and_equal_the_reference(both, columns, codes):
    base, target = both
    payload = packed.encode_packed(base, target, codes, columns=columns)
    assert payload == encode_packed_reference(base, target, codes, columns)
    assert np.array_equal(codec.decode(payload, base), target)
    fast, slow = codec.decode_patch(payload, base), decode_packed_reference(payload, base)
    assert np.array_equal(fast.positions, np.flatnonzero(base != target))
    assert np.array_equal(fast.positions, slow.positions)
    assert np.array_equal(fast.bits, slow.bits)
    assert fast.bits.dtype == slow.bits.dtype == base.dtype
    held = base.copy()
    assert codec.advance(payload, held) == len(fast)
    assert np.array_equal(held, target)


@settings(deadline=None, max_examples=40)
@given(pairs(), st.sampled_from([0, 7]))
def test_a_named_delta_moves_the_digest_and_is_never_larger(both, columns):
    base, target = both
    name = NAMES[base.itemsize]
    dtype = DTYPES[base.itemsize]
    coded = codec.encode_named(name, base, target, start=70, dtype=dtype, columns=columns)
    assert len(coded.payload) <= len(codec.encode(base, target, dtype=dtype, columns=columns))
    patch, gain = codec.decode_named(coded.payload, name, base, start=70, dtype=dtype)
    before, after = (codec.digest_bits(name, one, 70) for one in (base, target))
    assert before + gain == after == before + coded.moved
    assert len(patch) == coded.changed
    change = codec.ChangedRange(name, base, target, 70, columns)
    assert codec.encode_batch([change], dtype=dtype) == [coded]


@pytest.mark.parametrize(("count", "density"), [(4100, 0.01), (4100, 0.05), ((1 << 17) + 5, 0.001)])
def test_every_instruction_set_and_number_of_lanes_makes_the_same_bytes(count, density):
    """One lane; sixteen for more than 1,024 changes; sixteen for more than 2^20 codes."""
    base, target = moved(count, 4, density, count)
    payloads = set()
    for simd in ("portable", "avx2", "avx512"):
        with mock.patch.dict(os.environ, DELTAWIRE_SIMD=simd):
            payloads.add(packed.encode_packed(base, target, INTEGERS, columns=100, threads=2))
            assert np.array_equal(codec.decode(next(iter(payloads)), base), target)
    (payload,) = payloads
    if count < 1 << 14:
        assert payload == encode_packed_reference(base, target, INTEGERS, 100)


def test_single_codes_take_a_fraction_of_what_elements_take():
    base, target = moved(1 << 16, 4, 0.0002, 3)
    coded = codec.encode_named("x.weight_packed", base, target, dtype="I32", columns=512)
    assert len(coded.payload) < 0.6 * len(codec.encode(base, target, dtype="I32", columns=512))
    elsewhere = codec.encode_named("x.weight", base, target, dtype="I32", columns=512)
    assert elsewhere.payload == codec.encode(base, target, dtype="I32", columns=512)


def test_the_order_of_e2m1_is_that_of_its_values():
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    of_code = dict(enumerate(values + [-one for one in values]))
    bits = np.arange(16, dtype=np.uint8)[0::2] | np.arange(16, dtype=np.uint8)[1::2] << 4
    numbers = packed.numbers_of(bits, E2M1)
    assert np.array_equal(numbers, small_numbers(bits, E2M1))
    ranked = [of_code[code] for code in np.argsort(numbers)]
    assert ranked == sorted(ranked)
    assert numbers[8] == numbers[0] - 1  # -0 just below +0


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200), st.integers(0, 255), st.sampled_from([INTEGERS, E2M1]))
def test_damage_is_refused_or_stays_in_bounds(noise, place, codes):
    base, target = moved(90, 1, 0.05, place)
    payload = bytearray(packed.encode_packed(base, target, codes, columns=9))
    at = place % len(payload)
    payload[at : at + len(noise)] = noise
    try:
        patch = codec.decode_patch(bytes(payload), base)
    except CorruptError:
        return
    assert len(patch) == 0 or 0 <= patch.positions.min() <= patch.positions.max() < base.size
    assert bool((np.diff(patch.positions) > 0).all())


@pytest.mark.parametrize(
    ("field", "value"),
    [(1, 1), (2, 1), (3, 1), (4, 7), (5, 12), (5, 1 << 23), (6, 91)],
    ids=["width", "raw", "mantissa", "exponent", "columns", "long-columns", "count"],
)
def test_headers_that_are_not_of_this_base_are_refused(field, value):
    base, target = moved(90, 4, 0.05, 1)
    payload = packed.encode_packed(base, target, INTEGERS, columns=9)
    header = list(HEADER.unpack_from(payload))
    header[field] = value
    with pytest.raises(CorruptError):
        codec.decode_patch(HEADER.pack(*header) + payload[HEADER.size :], base)
    with pytest.raises(CorruptError):
        codec.decode_patch(payload[: HEADER.size - 1], base)
