"""The learner's arithmetic against naive twins."""

import math
import random
import statistics
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
    COMPARED_REPORTS,
    LEAST_REPORTS,
    LEAST_USERS,
    age_weights,
    cap_weights,
    capped_sums,
    effective_sample_size,
    outlying_users,
)
from deltawire.live.learning.window import JoinWindow, fit_delays

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
    found = advantages(Watching(0, 1), [case(), case()], np.array([0.0, 1.0]), np.ones(2), [0, 0])
    assert seen == ["value", "value", "add", "add"]
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
        st.tuples(st.floats(0.01, 1), st.sampled_from("abcdefgh"), st.sampled_from(["", "x", "y"])),
        min_size=1, max_size=50,
    ),
    st.sampled_from([0.2, 0.4, 1.0]), st.sampled_from([0.3, 0.6, 1.0]),
)  # fmt: skip
def test_no_user_and_no_cohort_weighs_more_than_its_cap(rows, user_cap, cohort_cap):
    weights, users, cohorts = (list(column) for column in zip(*rows, strict=True))
    found = cap_weights(np.array(weights), users, cohorts, user_cap=user_cap, cohort_cap=cohort_cap)
    assert (found <= np.array(weights) + 1e-12).all()
    total = found.sum()
    for names, cap in ((users, user_cap), (cohorts, cohort_cap)):
        for name in set(names) - {""}:
            share = sum(w for w, n in zip(found, names, strict=True) if n == name)
            assert share <= cap * total * (1 + 1e-5)


def test_few_users_are_not_trained_on_and_liars_are_bounded():
    alone = cap_weights(np.ones(8), ["a"] * 8, [""] * 8, user_cap=0.25, cohort_cap=1.0)
    assert not alone.any()
    users = ["liar"] * 90 + [f"u{n}" for n in range(50)]
    found = cap_weights(np.ones(140), users, [""] * 140, user_cap=0.02, cohort_cap=1.0)
    assert found[:90].sum() / found.sum() == pytest.approx(0.02)
    sybils = [f"s{n}" for n in range(100)] + [f"u{n}" for n in range(100)]
    names = ["new"] * 100 + ["old"] * 100
    found = cap_weights(np.ones(200), sybils, names, user_cap=0.05, cohort_cap=0.6)
    assert found[:100].sum() / found.sum() == pytest.approx(0.5)
    found = cap_weights(
        np.ones(200), sybils, ["new"] * 100 + [""] * 100, user_cap=0.05, cohort_cap=0.1
    )
    assert found[:100].sum() / found.sum() == pytest.approx(0.1)


def test_ages_and_effective_sample_size():
    assert age_weights(np.array([0.0, 10.0, 20.0]), 10.0).tolist() == [1.0, 0.5, 0.25]
    assert age_weights(np.array([5.0]), 0.0).tolist() == [1.0]
    assert effective_sample_size(np.ones(7)) == 7
    assert effective_sample_size(np.array([1.0, 0.0])) == 1
    assert effective_sample_size(np.zeros(3)) == 0


def naive_likelihood(share, mean, delays, silent):
    seen = sum(math.log(share / mean) - d / mean for d in delays)
    return seen + sum(math.log(1 - share + share * math.exp(-e / mean)) for e in silent)


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_of_delays_finds_the_maximum_and_the_truth(seed):
    rng = random.Random(seed)
    delays, silent = [], []
    for _ in range(3000):
        age = rng.uniform(0, 600)
        delay = rng.expovariate(1 / 120) if rng.random() < 0.4 else math.inf
        (delays if delay <= age else silent).append(min(delay, age))
    model = fit_delays(delays, silent)
    assert model.share == pytest.approx(0.4, abs=0.05)
    assert model.mean_s == pytest.approx(120, rel=0.2)
    best = model.log_likelihood
    assert best == pytest.approx(
        naive_likelihood(model.share, model.mean_s, delays, silent), abs=1e-2
    )
    for share in np.linspace(0.05, 0.95, 19):
        for mean in np.geomspace(20, 1000, 25):
            assert naive_likelihood(share, mean, delays, silent) <= best + 1e-2
    naive_share = len(delays) / 3000
    assert abs(model.share - 0.4) < abs(naive_share - 0.4)
    late = model.still_to_come(60)
    expected = 0.4 * math.exp(-0.5) / (0.6 + 0.4 * math.exp(-0.5))
    assert late == pytest.approx(expected, abs=0.05)


def test_states_of_the_window():
    window = JoinWindow(600, settle_s=30, still_likely=0.05)
    model = fit_delays([60.0] * 20, [10_000.0] * 20)
    assert model.mean_s == pytest.approx(60, rel=0.01)
    assert window.state(10, None, None) == "waiting"
    assert window.state(10, 5, None) == "waiting"
    assert window.state(40, 5, None) == "matured"
    assert window.state(100, None, model) == "waiting"
    assert window.state(250, None, model) == "silent"
    assert window.state(250, None, None) == "waiting"
    assert window.state(700, None, None) == "censored"
    assert window.state(700, 699, None) == "matured"
    assert fit_delays([1.0] * 9, []) is None


def naive_outliers(users, tasks, rewards, limit):
    """The deviations in plain Python, from the definition."""
    by_task, by_user = {}, {}
    for task, reward in zip(tasks, rewards, strict=True):
        by_task.setdefault(task, []).append(reward)
    for user, task, reward in zip(users, tasks, rewards, strict=True):
        by_user.setdefault(user, []).append(reward - statistics.fmean(by_task[task]))
    means = {user: statistics.fmean(left) for user, left in by_user.items()}
    compared = [user for user, left in by_user.items() if len(left) >= COMPARED_REPORTS and user]
    if len(compared) < LEAST_USERS:
        return set()
    squares = sum((x - means[u]) ** 2 for u, left in by_user.items() for x in left)
    within = squares / max(1, len(rewards) - len(by_user))
    middle = statistics.median(means[u] for u in compared)
    spread = 1.4826 * statistics.median(abs(means[u] - middle) for u in compared)
    between = max(0.0, spread**2 - statistics.median(within / len(by_user[u]) for u in compared))
    return {
        user
        for user, left in by_user.items()
        if user
        and len(left) >= LEAST_REPORTS
        and abs(means[user] - middle) > limit * math.sqrt(between + within / len(left) + 1e-12)
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.5, 6.0), st.integers(1, 30))
def test_outlying_users_are_those_of_the_definition(seed, limit, count):
    rng = random.Random(seed)
    users = [rng.choice(["", *(f"u{n}" for n in range(count))]) for _ in range(200)]
    tasks = [rng.choice("ab") for _ in users]
    rewards = [
        rng.gauss(0.3 * (t == "a") + (u == "u0"), 0.4) for u, t in zip(users, tasks, strict=True)
    ]
    found = outlying_users(users, tasks, np.array(rewards), limit=limit)
    assert found == naive_outliers(users, tasks, rewards, limit)


def test_a_liar_is_outlying_and_users_who_differ_honestly_are_not():
    rng = random.Random(5)
    users, rewards = [], []
    for number in range(60):
        mean = -0.5 if number == 7 else rng.gauss(0.4, 0.1)
        users += [f"u{number}"] * 30
        rewards += [rng.gauss(mean, 0.3) for _ in range(30)]
    tasks = ["t"] * len(users)
    assert outlying_users(users, tasks, np.array(rewards), limit=4.0) == {"u7"}
    assert outlying_users(users, tasks, np.array(rewards), limit=0.0) == set()
    few = [place for place in range(len(users)) if users[place] != "u7" or place % 30 < 5]
    chosen = [users[p] for p in few], [tasks[p] for p in few], np.array([rewards[p] for p in few])
    assert outlying_users(*chosen, limit=4.0) == set()
