"""Off-policy estimates: held to slow twins, and to a bandit whose optimum is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError
from deltawire.live.release.off_policy import (
    MeanEstimate,
    clipped_ratios,
    doubly_robust,
    effective_answers,
    predicted_outcomes,
    self_normalized,
)

RUNS = 250
REQUESTS = np.array([0.5, 0.3, 0.2])
LOGGING = np.array([[0.6, 0.2, 0.2], [0.3, 0.4, 0.3], [0.2, 0.2, 0.6]])
CANDIDATE = np.array([[0.3, 0.5, 0.2], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3]])
MEANS = np.array([[0.2, 0.8, 0.5], [0.5, 0.3, 0.9], [0.7, 0.4, 0.1]])
TRUTH = float(REQUESTS @ (CANDIDATE * MEANS).sum(1))


class Case:
    """The facts of a request that baselines know."""

    def __init__(self, task="", cohort="", turn=0, length=4):
        self.task, self.cohort, self.turn, self.length = task, cohort, turn, length


rows = st.lists(
    st.tuples(
        st.floats(-8, 8), st.floats(0, 1), st.sampled_from(["", "a", "b", "c"]), st.floats(0, 1)
    ),
    min_size=2,
    max_size=30,
)


@settings(max_examples=50, deadline=None)
@given(rows, st.sampled_from([0.0, 0.5, 10.0]))
def test_estimates_are_those_of_their_formulas(found, clip):
    """Slow twins: loops over the sums of the module's text."""
    ratios = clipped_ratios(np.array([row[0] for row in found]), clip)
    outcomes = np.array([row[1] for row in found])
    users = [row[2] or f"only {n}" for n, row in enumerate(found)]
    named = [row[2] for row in found]
    predicted = np.array([row[3] for row in found])
    slow = [min(math.exp(row[0]), clip or math.inf) for row in found]
    np.testing.assert_allclose(ratios, slow)
    total = sum(slow)
    effective = total**2 / sum(w * w for w in slow)
    assert effective_answers(ratios) == pytest.approx(effective)
    snips = sum(w * r for w, r in zip(slow, outcomes, strict=True)) / total
    robust = sum(q + w * (r - q) for w, r, q in zip(slow, outcomes, predicted, strict=True)) / len(
        found
    )
    estimates = (
        (snips, self_normalized(ratios, outcomes, named), [w / total for w in slow],
         [r - snips for r in outcomes]),
        (robust,
         doubly_robust(ratios, outcomes, named, logged_N=predicted, candidate_N=predicted),
         [1 / len(found)] * len(found),
         [q + w * (r - q) - robust for w, r, q in zip(slow, outcomes, predicted, strict=True)]),
    )  # fmt: skip
    for value, estimate, shares, residuals in estimates:
        assert estimate.value == pytest.approx(value, abs=1e-12)
        sums = {}
        for user, share, residual in zip(users, shares, residuals, strict=True):
            sums[user] = sums.get(user, 0.0) + share * residual
        if len(sums) < 2:
            assert estimate.error == math.inf
        else:
            squares = sum(one * one for one in sums.values()) * len(sums) / (len(sums) - 1)
            assert estimate.error == pytest.approx(math.sqrt(squares), abs=1e-12)


def logged(rng, count):
    """Logged requests, answers and outcomes of the bandit."""
    requests = rng.choice(3, count, p=REQUESTS)
    drawn = rng.random(count)
    answers = (drawn[:, None] > LOGGING[requests].cumsum(1)).sum(1)
    outcomes = (rng.random(count) < MEANS[requests, answers]).astype(float)
    return requests, answers, outcomes


def simulated(estimate, count=500, seed=0):
    """Estimates of many logs: their mean less the truth in standard errors, and the share of
    intervals that hold the truth."""
    rng = np.random.default_rng(seed)
    found = [estimate(*logged(rng, count)) for _ in range(RUNS)]
    values = np.array([one.value for one in found])
    covered = np.mean([one.interval[0] <= TRUTH <= one.interval[1] for one in found])
    return (values.mean() - TRUTH) / (values.std() / math.sqrt(RUNS)), covered, values.std()


def ratios_of(requests, answers):
    return CANDIDATE[requests, answers] / LOGGING[requests, answers]


def snips(requests, answers, outcomes):
    return self_normalized(ratios_of(requests, answers), outcomes, [""] * len(outcomes))


def robust_by(means, ratios=ratios_of):
    """DR with these predictions and ratios."""

    def estimate(requests, answers, outcomes):
        return doubly_robust(
            ratios(requests, answers), outcomes, [""] * len(outcomes),
            logged_N=means[requests, answers], candidate_N=(CANDIDATE * means).sum(1)[requests],
        )  # fmt: skip

    return estimate


WRONG = np.full_like(MEANS, 0.9)


@pytest.mark.parametrize(
    "estimate",
    [
        snips,
        robust_by(MEANS),
        robust_by(WRONG),
        robust_by(MEANS, lambda requests, _: np.full(len(requests), 0.7)),
    ],
    ids=["SNIPS", "DR", "DR with wrong predictions", "DR with wrong ratios"],
)
def test_a_known_bandit_is_estimated_without_bias_and_covered_as_stated(estimate):
    bias, covered, _ = simulated(estimate)
    assert abs(bias) < 3.5
    assert 0.92 <= covered <= 0.98


def test_what_is_wrong_in_both_parts_is_biased():
    """The test above can fail."""
    bias, covered, _ = simulated(robust_by(WRONG, lambda requests, _: np.full(len(requests), 0.7)))
    assert abs(bias) > 10
    assert covered < 0.85


def test_good_predictions_lower_the_error_and_a_clip_trades_bias_for_it():
    _, _, plain_error = simulated(robust_by(np.zeros_like(MEANS)))
    _, _, good_error = simulated(robust_by(MEANS))
    assert good_error < 0.8 * plain_error

    def clipped(requests, answers, outcomes):
        ratios = clipped_ratios(np.log(ratios_of(requests, answers)), 1.0)
        return self_normalized(ratios, outcomes, [""] * len(outcomes))

    bias, _, clipped_error = simulated(clipped)
    _, _, whole_error = simulated(snips)
    assert abs(bias) > 5
    assert clipped_error < whole_error


def test_errors_count_that_a_users_answers_resemble_each_other():
    """400 answers of 100 users who each like all or nothing: as independent answers, errors would
    be half as large as they are."""
    rng = np.random.default_rng(1)
    covered, naive = [], []
    for _ in range(RUNS):
        tastes = (rng.random(100) < 0.5).astype(float)
        outcomes, users = np.repeat(tastes, 4), [f"u{n // 4}" for n in range(400)]
        for found, names in ((covered, users), (naive, [""] * 400)):
            low, high = self_normalized(np.ones(400), outcomes, names).interval
            found.append(low <= 0.5 <= high)
    assert 0.92 <= np.mean(covered) <= 0.98
    assert np.mean(naive) < 0.8


def test_predictions_come_from_other_users():
    """An outcome never predicts itself: a task of one user is predicted like an unknown one."""
    cases = [Case(task="own" if n < 5 else "other") for n in range(40)]
    users = ["one"] * 5 + [f"u{n}" for n in range(35)]
    low, high = (
        predicted_outcomes(cases, np.array([value] * 5 + [0.5] * 35), users)[:5]
        for value in (0.0, 1.0)
    )
    np.testing.assert_allclose(low, high)
    assert abs(low - 0.5).max() < 0.2


def test_extremes_are_finite_or_refused():
    assert effective_answers(np.zeros(3)) == 0
    assert effective_answers(clipped_ratios(np.array([1e6, 1e6]), 0.0)) == pytest.approx(2)
    assert effective_answers(clipped_ratios(np.array([-1e6, 0.0]), 0.0)) == pytest.approx(1)
    with pytest.raises(InputError, match="no logged answer any probability"):
        self_normalized(np.zeros(3), np.ones(3), ["a", "b", "c"])
    assert MeanEstimate(0.5, 0.1).interval == pytest.approx((0.304, 0.696), abs=1e-3)
