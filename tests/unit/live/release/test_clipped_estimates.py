"""Estimates from logged answers, where the clip of their ratios leaves much out."""

import numpy as np
import pytest

from deltawire.live.release.off_policy import (
    bounds,
    clipped_mass,
    clipped_ratios,
    self_normalized,
)


def logged_where_outcomes_hang_on_preference(rng, count=200, kinds=20):
    """Ratios and outcomes of answers of 20 kinds, and the true mean of a candidate; kinds that it
    gives more often than the logging policy are better."""
    logging = rng.normal(0, 1, kinds)
    candidate = logging + rng.normal(0, 1, kinds)
    logging, candidate = (np.exp(one) / np.exp(one).sum() for one in (logging, candidate))
    rates = np.where(candidate > logging, 0.9, 0.1)
    drawn = rng.choice(kinds, count, p=logging)
    outcomes = (rng.random(count) < rates[drawn]).astype(float)
    return np.log(candidate[drawn] / logging[drawn]), outcomes, float(candidate @ rates)


def test_the_interval_counts_what_the_clip_leaves_out():
    rng, users = np.random.default_rng(5), [str(n) for n in range(200)]
    held = unguarded = 0
    for _ in range(300):
        log_ratios, outcomes, true = logged_where_outcomes_hang_on_preference(rng)
        ratios = clipped_ratios(log_ratios, 2.0)
        low, high = bounds(ratios, outcomes, users)
        assert high - low >= clipped_mass(ratios) - 1e-12
        held += low <= true <= high
        low, high = self_normalized(ratios, outcomes, users).interval
        unguarded += low <= true <= high
    assert held >= 285 - 12  # 95 %, and 3 standard deviations.
    assert unguarded < 270


def test_without_a_clipped_share_the_interval_is_that_of_the_mean():
    outcomes, users = np.array([1.0, 0.0] * 50), [str(n) for n in range(100)]
    low, high = bounds(np.ones(100), outcomes, users)
    assert clipped_mass(np.ones(100)) == 0
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - low == pytest.approx(2 * 1.96 * 0.05, rel=0.01)
