"""Positions draw every row once an epoch, and mixtures keep their shares, from any start."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.data import mixture_of, take
from deltawire.data.order import BLOCK
from deltawire.errors import InputError

seeds = st.integers(0, 1 << 31)


@settings(deadline=None)
@given(st.integers(1, 50), seeds, st.booleans())
def test_an_epoch_draws_every_row_once(count, seed, shuffle):
    drawn = [take(position, count, seed=seed, shuffle=shuffle) for position in range(3 * count)]
    for epoch in range(3):
        rows = [row for e, row in drawn if e == epoch]
        assert sorted(rows) == list(range(count))
        assert shuffle or rows == list(range(count))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.25, 10), min_size=1, max_size=5), seeds, st.integers(0, 3 * BLOCK))
def test_a_mixture_has_its_shares_and_counts_without_gaps(weights, seed, start):
    drawn = [mixture_of(position, weights, seed=seed) for position in range(2 * BLOCK)]
    for part, weight in enumerate(weights):
        places = [place for p, place in drawn if p == part]
        assert places == list(range(len(places)))
        share = weight / sum(weights) * BLOCK
        counts = Counter(p for p, _ in drawn[:BLOCK])
        assert abs(counts[part] - share) <= 1
    # A position says everything: nothing depends on those drawn before it.
    assert mixture_of(start, weights, seed=seed) == mixture_of(start, list(weights), seed=seed)


def test_the_order_is_the_seeds():
    orders = {tuple(take(p, 20, seed=seed)[1] for p in range(20)) for seed in range(5)}
    assert len(orders) == 5
    epochs = {tuple(take(20 * e + p, 20, seed=0)[1] for p in range(20)) for e in range(5)}
    assert len(epochs) == 5


def test_a_weight_that_never_draws_is_refused():
    with pytest.raises(InputError, match="less than one position"):
        mixture_of(0, [1.0, 1e-6], seed=0)
