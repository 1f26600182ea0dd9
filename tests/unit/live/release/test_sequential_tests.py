"""Wealth equals that of naive bettors, and error rates hold at every look."""

import math

import numpy as np
import pytest

from deltawire.config.release import DEFAULT_GUARDRAILS, ReleaseConfig
from deltawire.live.release.evidence import error_budget
from deltawire.live.release.sequential_tests import (
    ARRIVAL_BETS,
    LARGEST_BET,
    ArmDifference,
    ArrivalDifference,
    AssignmentShare,
    bets_of,
    log_evidence_path,
    log_threshold,
)


def naive_log_evidence(differences, tolerance, sign):
    """The mean wealth of bettors that multiply, one outcome after the other."""
    wealth = [1.0 for _ in bets_of(tolerance)]
    for difference in differences:
        for place, bet in enumerate(bets_of(tolerance)):
            wealth[place] *= 1 + bet * (sign * difference - tolerance)
    return math.log(sum(wealth) / len(wealth))


@pytest.mark.parametrize("tolerance", [-0.1, 0.0, 0.3])
@pytest.mark.parametrize("sign", [1, -1])
def test_wealth_is_that_of_naive_bettors(tolerance, sign):
    rng = np.random.default_rng(0)
    differences = rng.random(100) - rng.random(100)
    test = ArmDifference(tolerance=tolerance, sign=sign)
    test.add(differences[:7])
    test.add(differences[7:7])
    test.add(differences[7:])
    expected = naive_log_evidence(differences, tolerance, sign)
    assert test.log_evidence == pytest.approx(expected)
    assert test.mean == pytest.approx(differences.mean())
    path = log_evidence_path(differences, tolerance=tolerance, sign=sign)
    assert path[-1] == pytest.approx(expected, abs=1e-4)
    assert path[6] == pytest.approx(naive_log_evidence(differences[:7], tolerance, sign), abs=1e-4)


def naive_arrivals(candidate, outcomes, shares, tolerance, sign):
    """One unit after the other, from the definition of the payoff."""
    wealth, seen, path = [1.0] * len(ARRIVAL_BETS), [], []
    for z, y, s in zip(candidate, outcomes, shares, strict=True):
        m = (0.5 + sum(seen)) / (1 + len(seen))

        def gain(z, y, s=s, m=m):
            return sign * ((1 - s) * z - s * (1 - z)) * (y - m) - s * (1 - s) * tolerance

        worst = -min(gain(one, end) for one in (0, 1) for end in (0, 1))
        for place, bet in enumerate(ARRIVAL_BETS):
            wealth[place] *= 1 + min(bet, LARGEST_BET / max(worst, 1e-9)) * gain(z, y)
        seen.append(y)
        path.append(math.log(sum(wealth) / len(wealth)))
    return path


@pytest.mark.parametrize("tolerance", [-0.1, 0.0, 0.3])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_wealth_of_arms_is_that_of_naive_bettors(tolerance, sign):
    rng = np.random.default_rng(4)
    shares = np.repeat([0.01, 0.25, 0.8], 100)
    candidate = (rng.random(300) < shares).astype(float)
    outcomes = rng.random(300) ** 3
    expected = naive_arrivals(candidate, outcomes, shares, tolerance, sign)
    test, parts = ArrivalDifference(tolerance=tolerance, sign=sign), []
    for part in (slice(0, 7), slice(7, 7), slice(7, 290), slice(290, 300)):
        parts += test.add(candidate[part], outcomes[part], shares[part]).tolist()
    assert parts == pytest.approx(expected)
    assert test.log_evidence == pytest.approx(expected[-1])
    # Many canaries at once are multiplied row by row.
    many = ArrivalDifference(tolerance=tolerance, sign=sign, shape=(30,))
    paths = many.add(np.tile(candidate, (30, 1)), np.tile(outcomes, (30, 1)), shares)
    assert paths[29] == pytest.approx(expected)
    many.keep(np.arange(30) == 7)
    assert many.log_evidence == pytest.approx(expected[-1:])
    assert many.mean.tolist() == pytest.approx([float(test.mean)])


def test_the_difference_of_arms_counts_each_time_alike():
    """The level falls when the share grows: pooled means would show a difference of 0.27."""
    shares = np.repeat([0.1, 0.5], 1000)
    candidate = np.concatenate([np.arange(1000) % 10 == 0, np.arange(1000) % 2 == 0]).astype(float)
    outcomes = np.repeat([0.9, 0.3], 1000)
    test = ArrivalDifference(tolerance=0.0)
    test.add(candidate, outcomes, shares)
    assert test.mean == pytest.approx(0.0, abs=1e-9)
    assert ArrivalDifference(tolerance=0.0).mean == 0.0


@pytest.mark.parametrize("worst", [-1.0, 1.0])
@pytest.mark.parametrize("tolerance", [-0.99, 0.0, 0.99])
def test_the_worst_outcomes_leave_wealth_positive(worst, tolerance):
    for sign in (1, -1):
        test = ArmDifference(tolerance=tolerance, sign=sign)
        test.add(np.full(100, worst))
        assert math.isfinite(test.log_evidence)
        arms = ArrivalDifference(tolerance=tolerance, sign=sign)
        for share in (0.01, 0.5, 0.99):
            for arm in (0.0, 1.0):
                arms.add(np.full(500, arm), np.full(500, (worst + 1) / 2), np.array(share))
        assert math.isfinite(arms.log_evidence)


@pytest.mark.parametrize("tolerance", [-0.02, 0.05])
def test_false_rejections_stay_below_the_error_rate_at_every_look(tolerance):
    """At the edge of the null hypothesis; 0.05 of 300 and 3 standard deviations are 26."""
    rng = np.random.default_rng(1)
    mine = (rng.random((300, 400)) < 0.5 + tolerance).astype(float)
    theirs = (rng.random((300, 400)) < 0.5).astype(float)
    path = log_evidence_path(mine - theirs, tolerance=tolerance)
    assert (path.max(axis=-1) >= log_threshold(0.05)).sum() <= 26


def naive_sample_ratio(arms, share, strength=100.0):
    """The product of predictive over stated probabilities, one user after the other."""
    one, other, log_ratio = strength * share, strength * (1 - share), 0.0
    for arm in arms:
        p = one / (one + other)
        log_ratio += math.log(p / share) if arm else math.log((1 - p) / (1 - share))
        one, other = one + arm, other + 1 - arm
    return log_ratio


def test_the_sample_ratio_is_that_of_predictions_one_by_one():
    rng = np.random.default_rng(2)
    check, expected = AssignmentShare(), 0.0
    for share in (0.05, 0.5):
        arms = (rng.random(300) < share).astype(int)
        check.add(candidates=int(arms.sum()), users=len(arms), share=share)
        expected += naive_sample_ratio(arms, share)
    assert check.log_evidence == pytest.approx(expected)
    check.add(candidates=400, users=1000, share=0.5)
    assert check.log_evidence > log_threshold(0.005)


def test_the_sample_ratio_alarms_rarely_without_a_mismatch():
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(300):
        counts = np.cumsum(rng.random(600) < 0.3)
        for look in range(50, 600, 50):
            check = AssignmentShare()
            check.add(candidates=int(counts[look - 1]), users=look, share=0.3)
            if check.log_evidence >= log_threshold(0.05):
                wrong += 1
                break
    assert wrong <= 26  # 15 expected at most, and 3 standard deviations.


def test_the_error_rate_is_spent_once():
    budget = error_budget(ReleaseConfig())
    spent = budget.gate + budget.rollback + len(DEFAULT_GUARDRAILS) * budget.guardrail
    assert spent == pytest.approx(0.05)
    sets = error_budget(ReleaseConfig(gate={"accuracy": 0.02, "hard": 0.02}))
    assert 2 * sets.gate == pytest.approx(budget.gate)
    assert budget.promotion == 0.05
    alone = error_budget(ReleaseConfig(guardrails={}, gate={}))
    assert (alone.rollback, alone.gate) == (0.05, 0.0)
