"""The rules of allocation, held against slower ways to the same answers."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.config.allocation import AllocationConfig, BandConfig
from deltawire.rl.allocation.curriculum import is_drawn, weight_of
from deltawire.rl.allocation.knapsack import divide_budget, gradient_value, marginal_value
from deltawire.rl.allocation.posterior import TaskPosterior
from deltawire.rl.allocation.rules import PromptOutcome, decide

rates = st.floats(0, 1, allow_nan=False)
rewards = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=40)


def slow_value(rate, completions):
    """Sums over every sequence of outcomes whose rewards differ."""
    mixed = 0.0
    for outcomes in itertools.product((0, 1), repeat=completions):
        if len(set(outcomes)) > 1:
            ones = sum(outcomes)
            mixed += rate**ones * (1 - rate) ** (completions - ones)
    return mixed * rate * (1 - rate) ** 2


def slow_division(rates, spent, budget, largest):
    """The largest total value of any division, by a table over the budget."""
    best = {0: 0.0}
    for rate, have in zip(rates, spent, strict=True):
        now = {}
        for used, value in best.items():
            for more in range(min(budget - used, max(0, largest - have)) + 1):
                gain = gradient_value(rate, have + more) - gradient_value(rate, have)
                now[used + more] = max(now.get(used + more, -1.0), value + gain)
        best = now
    return max(best.values())


@settings(max_examples=30)
@given(rates, st.integers(1, 6))
def test_the_value_is_that_of_all_outcomes(rate, completions):
    assert abs(gradient_value(rate, completions) - slow_value(rate, completions)) < 1e-12


@given(rates, st.integers(1, 60))
def test_marginal_values_are_differences_and_never_rise(rate, completions):
    gain = gradient_value(rate, completions + 1) - gradient_value(rate, completions)
    assert abs(marginal_value(rate, completions) - gain) < 1e-12
    assert marginal_value(rate, completions + 1) <= marginal_value(rate, completions)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(rates, st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(0, 12),
    st.integers(1, 10),
)
def test_the_greedy_division_is_as_good_as_any(prompts, budget, largest):
    some, spent = [rate for rate, _ in prompts], [have for _, have in prompts]
    more = divide_budget(some, spent, budget, largest=largest)
    assert sum(more) <= budget
    assert all(
        extra == 0 or have + extra <= largest for have, extra in zip(spent, more, strict=True)
    )
    total = sum(
        gradient_value(rate, have + extra) - gradient_value(rate, have)
        for rate, have, extra in zip(some, spent, more, strict=True)
    )
    assert abs(total - slow_division(some, spent, budget, largest)) < 1e-9


@settings(max_examples=60)
@given(rewards, st.integers(2, 8), st.integers(0, 6), st.integers(0, 4), st.integers(0, 3))
def test_every_policy_ends_within_its_bounds(found, pilot, stage, enough, defers):
    for policy in ("fixed", "refill", "pilot", "knapsack"):
        config = AllocationConfig(
            policy=policy, pilot=pilot, largest=24, stage=stage, enough=enough
        )
        have = list(found[:pilot])
        for _ in range(50):
            outcome = PromptOutcome.of(have, success_at=1.0)
            decision = decide(config, outcome, defers=defers, planned=12)
            if decision.verdict != "fill":
                break
            assert decision.more > 0
            have += (found * 24)[: decision.more]
            assert len(have) <= max(24, pilot)
        else:
            raise AssertionError("it never ends")
        if policy != "fixed" and decision.verdict == "train":
            assert outcome.spread
        if decision.verdict == "defer":
            assert defers < config.max_defers


@given(rewards)
def test_refill_is_dapos_filter(found):
    outcome = PromptOutcome.of(found, success_at=1.0)
    expected = "skip" if max(found) == min(found) else "train"
    assert decide(AllocationConfig(policy="refill"), outcome).verdict == expected


def test_pilot_commit_by_its_thresholds():
    config = AllocationConfig(policy="pilot", pilot=16, largest=64)
    for successes in range(17):
        found = [1.0] * successes + [0.0] * (16 - successes)
        decision = decide(config, PromptOutcome.of(found, success_at=1.0))
        if successes > 12:
            assert decision.verdict == "skip"
        elif successes < 2:
            assert decision.verdict == "defer"
        else:
            assert (decision.verdict, decision.more) == ("fill", 48)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 120)), max_size=12),
    st.floats(0.5, 0.99),
)
def test_the_posterior_is_the_discounted_sum(evidence, discount):
    posterior, now = TaskPosterior(discount), 120
    evidence = sorted(evidence, key=lambda one: one[2])
    for successes, failures, version in evidence:
        posterior.observe("t", successes=successes, failures=failures, version=version)
    a = b = 1.0
    for successes, failures, version in evidence:
        if discount ** (now - version) >= 0.01 * discount and now - version < posterior.horizon:
            a += successes * discount ** (now - version)
            b += failures * discount ** (now - version)
    assert abs(posterior.beta("t", version=now)[0] - a) < 1e-9
    assert abs(posterior.mean("t", version=now) - a / (a + b)) < 1e-9
    assert posterior.mean("other", version=now) == 0.5


@given(st.integers(0, 1000), st.lists(rates, min_size=1, max_size=5, unique=True))
def test_a_band_of_weight_0_is_never_drawn_and_1_always(seed, bounds):
    bands = [BandConfig(up_to=bound, weight=bound) for bound in sorted(bounds)]
    for rate in bounds:
        assert weight_of(bands, rate) == rate
    assert not is_drawn(seed, 0.0, seed=seed)
    assert is_drawn(seed, 1.0, seed=seed)


def test_positions_are_drawn_as_often_as_the_weight_says():
    drawn = sum(is_drawn(position, 0.2, seed=3) for position in range(10_000))
    assert abs(drawn - 2000) < 160  # 4 standard deviations.
