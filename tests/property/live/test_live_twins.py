"""The learner's arithmetic against naive twins."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.live.learning.advantages import (
    EPSILON,
    LARGEST,
    LearnedBaseline,
    ValueTracker,
    advantages,
    batch_normalized,
)
from deltawire.live.learning.influence import (
    age_weights,
    cap_influence,
    capped_sums,
    influence_sizes,
)
from deltawire.live.learning.window import (
    DelayModel,
    JoinWindow,
    fit_delays,
    sampled,
    share_up_to,
)

REWARDS = st.lists(st.tuples(st.floats(-1, 1), st.floats(0.01, 1)), min_size=1, max_size=40)


def case(task="t", cohort="c", turn=0, length=10):
    return SimpleNamespace(task=task, cohort=cohort, turn=turn, length=length)


@given(REWARDS)
def test_batch_normalization_is_that_of_a_loop(rows):
    rewards, weights = (list(column) for column in zip(*rows, strict=True))
    total = math.fsum(weights)
    mean = math.fsum(w * r for r, w in rows) / total
    std = math.sqrt(math.fsum(w * (r - mean) ** 2 for r, w in rows) / total)
    naive = [max(-LARGEST, min(LARGEST, (r - mean) / (std + EPSILON))) for r in rewards]
    found = batch_normalized(np.array(rewards), np.array(weights))
    assert found == pytest.approx(naive, abs=1e-7)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1, 3), st.integers(0, 5)), max_size=60))
def test_the_value_tracker_is_a_weighted_mean_of_what_came_before(rows):
    tracker = ValueTracker(-1.0, 3.0, half_life=2.0, prior=2.0, most=1e9)
    history = {"a": [], "b": []}
    for task, reward, step in rows:
        before = history[task]
        newest = max((version for _, version in before), default=0)
        version = newest + step if before else step
        found = tracker.value(case(task))
        first = before[0][1] if before else 0
        good = 1.0 * 2.0 ** (-(newest - first) / 2) if before else 1.0
        count = 2 * good
        for old, at in before:
            kept = 2.0 ** (-(newest - at) / 2)
            good += kept * (old + 1) / 4
            count += kept
        assert found == pytest.approx(-1 + 4 * good / count, abs=1e-9)
        tracker.add(case(task), reward, version)
        before.append((reward, version))


def test_a_tracker_of_recurring_tasks_removes_what_is_the_tasks():
    rng = random.Random(0)
    tracker = ValueTracker(0.0, 1.0)
    left, total = [], []
    for step in range(2000):
        task = rng.choice("ab")
        reward = float(rng.random() < (0.9 if task == "a" else 0.1))
        if step > 200:
            left.append(reward - tracker.value(case(task)))
            total.append(reward)
        tracker.add(case(task), reward, 0)
    assert np.var(left) < 0.5 * np.var(total)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.floats(-1, 1)), max_size=30)
)
def test_the_learned_baseline_is_ridge_regression(rows):
    model = LearnedBaseline(buckets=4, ridge=2.0)
    xs, ys = [], []
    for task, turn, reward in rows:
        one = case(task, turn=turn)
        xs.append(model.features(one))
        ys.append(reward)
        model.add(one, reward, 0)
    penalty = np.diag([1e-3] + [math.sqrt(2.0)] * 10)
    stacked = np.vstack([np.reshape(xs, (-1, 11)), penalty])
    naive = np.linalg.lstsq(stacked, np.array([*ys, *[0.0] * 11]), rcond=None)[0]
    for task in "abcd":
        one = case(task)
        assert model.value(one) == pytest.approx(float(naive @ model.features(one)), abs=1e-5)


def test_no_answer_is_part_of_its_own_baseline():
    class Watching(ValueTracker):
        def add(self, one, reward, version):
            seen.append("add")
            super().add(one, reward, version)

        def value(self, one):
            seen.append("value")
            return super().value(one)

    seen = []
    found = advantages(Watching(0, 1), [case(), case()], np.array([0.0, 1.0]), np.ones(2))
    assert seen == ["value", "value"]
    assert found[0] == -found[1] < 0


def naive_cap(sums, cap):
    """Lower everyone who is above the share, again and again."""
    sums = list(sums)
    for _ in range(20_000):
        total = math.fsum(sums)
        lowered = [min(one, cap * total) for one in sums]
        if total - math.fsum(lowered) < 1e-13 * total:
            return sums
        sums = lowered
    return [0.0] * len(sums)


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=12), st.sampled_from([0.11, 0.3, 0.5, 1.0])
)
def test_caps_are_the_fixed_point_of_lowering(sums, cap):
    if abs(1 / cap - round(1 / cap)) < 1e-9 and len(sums) == round(1 / cap):
        return  # The bound holds with equality only: the loop below takes forever to see it.
    found = capped_sums(np.array(sums), cap)
    assert found == pytest.approx(naive_cap(sums, cap), rel=1e-4, abs=1e-4)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1), st.floats(0, 5000), st.sampled_from("abcdefgh")),
        min_size=1, max_size=50,
    ),
    st.sampled_from([0.2, 0.4, 1.0]),
)  # fmt: skip
def test_no_user_has_more_influence_than_its_cap(rows, cap):
    weights, sizes, users = (list(column) for column in zip(*rows, strict=True))
    found = cap_influence(np.array(weights), np.array(sizes), users, cap)
    assert (found <= np.array(weights) + 1e-12).all()
    total = float(found @ np.array(sizes))
    for name in set(users):
        rows_of = zip(found, sizes, users, strict=True)
        share = sum(w * s for w, s, n in rows_of if n == name)
        assert share <= cap * total * (1 + 1e-5)


def test_few_users_are_not_trained_on_and_liars_are_bounded():
    alone = cap_influence(np.ones(8), np.ones(8), ["a"] * 8, 0.25)
    assert not alone.any()
    users = ["liar"] * 90 + [f"u{n}" for n in range(50)]
    found = cap_influence(np.ones(140), np.ones(140), users, 0.02)
    assert found[:90].sum() / found.sum() == pytest.approx(0.02)
    sizes = np.array([4000.0] + [50.0] * 50)
    found = cap_influence(np.ones(51), sizes, [f"u{n}" for n in range(51)], 0.05)
    assert found[0] * 4000 / (found @ sizes) == pytest.approx(0.05)
    assert (found[1:] == 1).all(), "the others keep their weight"


def test_influence_is_what_the_loss_adds_up():
    advantages_E, tokens_E = np.array([1.0, -2.0]), np.array([10.0, 100.0])
    for name in ("token_mean", "dr_grpo"):
        assert influence_sizes(advantages_E, tokens_E, name).tolist() == [10.0, 200.0]
    found = influence_sizes(advantages_E, tokens_E, "seq_mean_token_mean")
    assert found.tolist() == [1.0, 2.0]


def test_weights_of_ages():
    assert age_weights(np.array([0.0, 10.0, 20.0]), 10.0).tolist() == [1.0, 0.5, 0.25]
    assert age_weights(np.array([5.0]), 0.0).tolist() == [1.0]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda p: (min(p), max(p))),
        min_size=1, max_size=30,
    )
)  # fmt: skip
def test_shares_of_delays_are_those_of_the_formula(rows):
    times, shares = share_up_to(*np.array(rows, np.float64).T)
    for time, share in zip(times, shares, strict=True):
        naive = 1.0
        for later in {d for d, _ in rows if d > time}:
            at_risk = sum(d <= later <= age for d, age in rows)
            naive *= 1 - sum(d == later for d, _ in rows) / at_risk
        assert share == pytest.approx(naive)


@pytest.mark.parametrize("seed", range(3))
def test_new_answers_do_not_make_delays_look_short(seed):
    rng = np.random.default_rng(seed)
    ages = rng.uniform(0, 1000, 20_000)
    delays = rng.exponential(200, 20_000)
    seen = delays <= np.minimum(ages, 1000)
    rows = [*zip(delays[seen].tolist(), ages[seen].tolist(), strict=True)]
    truth = 200 * -np.log(1 - 0.9 * (1 - np.exp(-5)))
    times, shares = share_up_to(*np.array(rows).T)
    assert times[np.searchsorted(shares, 0.9)] == pytest.approx(truth, rel=0.06)
    naive = np.quantile(delays[seen], 0.9)
    assert naive < 0.9 * truth, "without the correction"
    model = fit_delays({"a": rows, "b": [(1.0, 1e3)] * 500}, 20_500, window_s=1e3, still_likely=0.1)
    assert model.waits["b"] == 1.0
    assert 0.98 * truth <= model.wait_s <= 1.2 * truth


def test_states_of_the_window():
    window = JoinWindow(600, settle_s=30, still_likely=0.05)
    model = DelayModel({"accept": 20.0, "reject": 200.0}, {"accept": 40, "reject": 40}, 0.5)
    assert window.state(10, None, None) == "waiting"
    assert window.state(10, 5, None) == "waiting"
    assert window.state(40, 5, None) == "matured"
    assert window.state(100, None, model) == "waiting"
    assert window.state(250, None, model) == "silent"
    assert window.state(250, None, None) == "waiting"
    assert window.state(700, None, None) == "censored"
    assert window.state(700, 699, None) == "matured"
    assert fit_delays({"a": [(1.0, 600.0)] * 9}, 9, window_s=600, still_likely=0.05) is None
    rare = fit_delays({"a": [(1.0, 9e2)] * 3 + [(5.0, 9e2)] * 9}, 12, window_s=6e2, still_likely=0)
    assert rare.wait_s == 5.0, "too few to know: as long as the longest"
    assert sampled([10.0, 599.0], window_s=600, most=10) == [], "no window has passed"
    assert sampled([1300.0, 601.0, 5.0, 300.0], window_s=600, most=2) == [2, 1]
