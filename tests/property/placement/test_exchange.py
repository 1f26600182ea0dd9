"""The native exchange of bits, against the same in NumPy: all of it, or nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import _native

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


def drawn(dtype, sizes, share, seed):
    """Arrays, and a share of each one's elements to be changed, in any order."""
    rng = np.random.default_rng(seed)
    high = np.iinfo(dtype).max
    live = [rng.integers(0, high, size, dtype, endpoint=True) for size in sizes]
    places = [rng.permutation(size)[: round(share * size)].astype(np.int64) for size in sizes]
    old = np.concatenate([bits[at] for bits, at in zip(live, places, strict=True)])
    fresh = rng.integers(0, high, old.size, dtype, endpoint=True)
    lasts = np.cumsum([at.size for at in places], dtype=np.int64)
    return live, lasts, np.concatenate(places), old, fresh


def assigned(live, lasts, index, fresh):
    expected = [bits.copy() for bits in live]
    for bits, first, last in zip(expected, [0, *lasts], lasts, strict=False):
        bits[index[first:last]] = fresh[first:last]
    return expected


def same(left, right):
    return all(np.array_equal(*pair) for pair in zip(left, right, strict=True))


@given(
    st.sampled_from(WIDTHS),
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    st.sampled_from([0, 0.001, 0.3, 1]),
    st.integers(0, 99),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_exchanging_equals_assigning(dtype, sizes, share, seed, threads):
    live, lasts, index, old, fresh = drawn(dtype, sizes, share, seed)
    before = [bits.copy() for bits in live]
    expected = assigned(live, lasts, index, fresh)
    assert _native.exchange(live, lasts, index, old, fresh, threads)[0] == 0
    assert same(live, expected)
    assert _native.exchange(live, lasts, index, fresh, old, threads)[0] == 0
    assert same(live, before)


SIZES = [90_000, 1, 3, 250_000, 60_000]
"""Threads share them so that ends of shares fall inside of some, and some lie inside of a share;
of one nothing changes."""


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_many_threads_equal_one_and_a_drifted_element_changes_nothing(dtype, threads):
    live, lasts, index, old, fresh = drawn(dtype, SIZES, 0.5, 3)
    before = [bits.copy() for bits in live]
    expected = assigned(live, lasts, index, fresh)
    for number, first, last in zip(range(5), [0, *lasts], lasts, strict=False):
        for at in {first, (first + last) // 2, last - 1} & set(range(first, last)):
            wrong = old.copy()
            wrong[at] ^= 1
            assert _native.exchange(live, lasts, index, wrong, fresh, threads) == (1, number)
            # Written bits went back to the values that the caller gave; only there may they differ.
            assert same(live, before)
    assert _native.exchange(live, lasts, index, old, fresh, threads)[0] == 0
    assert same(live, expected)


@pytest.mark.parametrize("place", [-1, 250_000, 1 << 62, -(1 << 63)])
def test_places_outside_are_refused_and_nothing_is_written(place):
    live, lasts, index, old, fresh = drawn(np.uint16, SIZES, 0.5, 4)
    before = [bits.copy() for bits in live]
    index[100_000] = place
    with pytest.raises(ValueError, match="outside"):
        _native.exchange(live, lasts, index, old, fresh, 2)
    assert same(live, before)


@pytest.mark.parametrize(
    "lasts",
    [[3, 9], [3, 11], [11, 10], [-1, 10], [-(1 << 63), 10], [10], [3, 5, 10], []],
)
def test_ends_that_do_not_fit_are_refused(lasts):
    live, _, index, old, fresh = drawn(np.uint16, [100], 0.1, 5)
    before = live[0].copy()
    with pytest.raises(ValueError, match="must end after"):
        _native.exchange(live * 2, np.array(lasts, np.int64), index, old, fresh, 2)
    assert np.array_equal(live[0], before)


def test_lengths_and_widths_must_agree():
    live, lasts, index, old, fresh = drawn(np.uint16, [100], 0.1, 5)
    with pytest.raises(ValueError, match="same length"):
        _native.exchange(live, lasts, index, old[1:], fresh, 1)
    with pytest.raises(TypeError):
        _native.exchange(live, lasts, index, old.astype(np.uint32), fresh, 1)
    with pytest.raises(TypeError):  # It would be a copy that is written.
        _native.exchange([live[0].astype(np.uint32)], lasts, index, old, fresh, 1)
    with pytest.raises(TypeError):
        _native.exchange([np.repeat(live[0], 2)[::2]], lasts, index, old, fresh, 1)
    live[0].flags.writeable = False
    with pytest.raises(TypeError):
        _native.exchange(live, lasts, index, old, fresh, 1)
