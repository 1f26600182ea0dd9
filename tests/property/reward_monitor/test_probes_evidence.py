"""The statistical test of the probes: its false-alarm rate, its delay, its bounds."""

import itertools
import math
import random

import pytest

from deltawire.reward_monitor.evidence import BETS, advance, delay_bound, evidence, threshold

TOLERANCE, FALSE_ALARM = 0.05, 0.01


def stopped_at(values, *, number=1, false_alarm=FALSE_ALARM, tolerance=TOLERANCE):
    """The group (from 1) at which a stream is flagged; None if it never is."""
    wealth = [0.0] * len(BETS)
    for count, y in enumerate(values, 1):
        wealth = advance(wealth, count, y, tolerance)
        if evidence(wealth, count) >= threshold(false_alarm, number):
            return count
    return None


def test_it_equals_its_definition_summed_over_every_start():
    """The recursion against Σ_s w_s Π_{t ≥ s} (1 + λ (y_t − b)), each start on its own."""
    rng = random.Random(1)
    values = [rng.random() ** 3 for _ in range(40)]
    wealth = [0.0] * len(BETS)
    for count, y in enumerate(values, 1):
        wealth = advance(wealth, count, y, TOLERANCE)
        total = 0.0
        for bet in BETS:
            for start in range(1, count + 1):
                product = 1 / (start * (start + 1))
                for later in values[start - 1 : count]:
                    product *= 1 + bet / TOLERANCE * (later - TOLERANCE)
                total += product / len(BETS)
        total += 1 - sum(1 / (s * (s + 1)) for s in range(1, count + 1))
        assert evidence(wealth, count) == pytest.approx(total, rel=1e-9)


def test_its_expectation_never_exceeds_one_at_the_edge_of_the_tolerance():
    """Exactly, over every sequence of eight groups that cheat (y = 1) with the tolerated chance."""
    tolerance = 0.25
    expected = 0.0
    for values in itertools.product((0.0, 1.0), repeat=8):
        chance = math.prod(tolerance if y else 1 - tolerance for y in values)
        wealth = [0.0] * len(BETS)
        for count, y in enumerate(values, 1):
            wealth = advance(wealth, count, y, tolerance)
        expected += chance * evidence(wealth, 8)
    assert expected == pytest.approx(1.0, rel=1e-12)


def test_false_alarms_are_as_rare_as_stated_even_at_the_edge_of_the_tolerance():
    """300 streams of 1000 groups whose excess is the tolerance itself. The first stream gets half
    of α = 0.2, so at most 30 are expected; 50 would be four standard deviations off. And some, or
    the test would have no power."""
    rng = random.Random(7)
    alarms = 0
    for _ in range(300):
        values = (float(rng.random() < TOLERANCE) for _ in range(1000))
        alarms += stopped_at(values, false_alarm=0.2) is not None
    assert 1 <= alarms <= 50


@pytest.mark.parametrize("start", [1, 10, 300])
@pytest.mark.parametrize("number", [1, 12])
@pytest.mark.parametrize("y", [1.0, 0.5, 0.2])
def test_a_change_is_found_within_the_bound_whenever_it_comes(start, number, y):
    bound = delay_bound(
        start=start, number=number, false_alarm=FALSE_ALARM, tolerance=TOLERANCE, y=y
    )
    values = [0.0] * (start - 1) + [y] * bound
    found = stopped_at(values, number=number)
    assert found is not None
    assert start <= found < start + bound


def test_the_delays_that_the_documents_state():
    bounds = [
        delay_bound(start=s, number=7, false_alarm=0.01, tolerance=0.05) for s in (1, 100, 10_000)
    ]
    assert bounds == [4, 8, 11]
    with pytest.raises(ValueError, match="within the tolerance"):
        delay_bound(start=1, number=1, false_alarm=0.01, tolerance=0.05, y=0.04)


def test_streams_together_use_up_no_more_than_the_stated_rate():
    assert sum(1 / threshold(0.01, n) for n in range(1, 100_000)) < 0.01


def test_long_runs_neither_overflow_nor_lose_their_footing():
    wealth = [0.0] * len(BETS)
    for count in range(1, 3000):
        wealth = advance(wealth, count, 1.0, TOLERANCE)
    assert math.isfinite(evidence(wealth, 3000))
    for count in range(3000, 60_000):
        wealth = advance(wealth, count, 0.0, TOLERANCE)
    assert min(wealth) >= 0
    assert evidence(wealth, 60_000) < 1


@pytest.mark.parametrize("y", [-0.1, 1.1, math.nan])
def test_what_is_no_excess_is_refused(y):
    with pytest.raises(ValueError, match="excess"):
        advance([0.0] * len(BETS), 1, y, TOLERANCE)
