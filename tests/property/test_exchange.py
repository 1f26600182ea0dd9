"""The native exchange of bits, against the same in NumPy: all of it, or nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import _native

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


def drawn(dtype, size, count, seed):
    rng = np.random.default_rng(seed)
    live = rng.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    index = rng.permutation(size)[:count].astype(np.int64)
    fresh = rng.integers(0, np.iinfo(dtype).max, index.size, dtype, endpoint=True)
    return live, index, live[index], fresh


@given(
    st.sampled_from(WIDTHS), st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 99),
    st.integers(1, 3),
)  # fmt: skip
@settings(deadline=None)
def test_exchanging_equals_assigning(dtype, size, count, seed, threads):
    live, index, old, fresh = drawn(dtype, size, count, seed)
    expected = live.copy()
    expected[index] = fresh
    assert _native.exchange(live, index, old, fresh, threads) == 0
    assert np.array_equal(live, expected)
    assert _native.exchange(live, index, fresh, old, threads) == 0


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_many_threads_equal_one_and_a_drifted_element_changes_nothing(dtype, threads):
    live, index, old, fresh = drawn(dtype, 400_000, 150_001, 3)
    before, expected = live.copy(), live.copy()
    expected[index] = fresh
    for at in (0, 70_000, 150_000):
        wrong = old.copy()
        wrong[at] ^= 1
        assert _native.exchange(live, index, wrong, fresh, threads) == 1
        # What was written went back as the caller said it was; only there may it differ.
        assert np.array_equal(live, before)
    assert _native.exchange(live, index, old, fresh, threads) == 0
    assert np.array_equal(live, expected)


@pytest.mark.parametrize("place", [-1, 400_000, 1 << 62, -(1 << 63)])
def test_places_outside_are_refused_and_nothing_is_written(place):
    live, index, old, fresh = drawn(np.uint16, 400_000, 150_001, 4)
    before = live.copy()
    index[100_000] = place
    with pytest.raises(ValueError, match="outside"):
        _native.exchange(live, index, old, fresh, 2)
    assert np.array_equal(live, before)


def test_lengths_and_widths_must_agree():
    live, index, old, fresh = drawn(np.uint16, 100, 10, 5)
    with pytest.raises(ValueError, match="same length"):
        _native.exchange(live, index, old[1:], fresh, 1)
    with pytest.raises(TypeError):
        _native.exchange(live, index, old.astype(np.uint32), fresh, 1)
    live.flags.writeable = False
    with pytest.raises(TypeError):
        _native.exchange(live, index, old, fresh, 1)
