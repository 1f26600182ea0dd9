"""Advantages of prompts of unequal sizes, stored in parts, held against slower ways; and the bias
of choosing sizes by rewards."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.config import AllocationConfig, parse_config
from deltawire.errors import BugError
from deltawire.rl.allocation.rules import PromptOutcome, decide
from deltawire.train.statistics import GroupStatistics
from deltawire.train.step import advantages_of, prompts_of
from deltawire.wire.rollouts import Group, Trajectory


def group(rewards):
    rows = [
        Trajectory(
            np.array([1], np.int32),
            np.array([-1.0], np.float32),
            np.zeros(1, np.int32),
            np.ones(1, np.uint8),
            reward,
            "stop",
        )
        for reward in rewards
    ]
    return Group("w", "n", "t", 1.0, np.array([1], np.int32), rows)


def config_of(advantage):
    raw = {
        "name": "parts",
        "model": {"path": "m"},
        "train": {"loss": {"advantage": advantage}},
    }
    return parse_config(raw, source="test")


def slow_advantages(prompt, advantage):
    """One prompt's advantages, with a loop for each completion."""
    mean = sum(prompt) / len(prompt)
    if advantage == "group_mean":
        return [reward - mean for reward in prompt]
    if advantage == "group_std":
        spread = statistics.stdev(prompt) if len(prompt) > 1 else 0.0
        return [(reward - mean) / (spread + 1e-4) for reward in prompt]
    found = []
    for place, reward in enumerate(prompt):
        others = prompt[:place] + prompt[place + 1 :]
        found.append(reward - sum(others) / len(others) if others else 0.0)
    return found


rewards = st.sampled_from([0.0, 0.25, 1.0])
prompts = st.lists(
    st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(prompts, st.sampled_from(["group_mean", "group_std", "leave_one_out"]))
def test_parts_of_a_prompt_share_its_baseline(parted, advantage):
    groups = [group(part) for prompt in parted for part in prompt]
    parts = [len(prompt) for prompt in parted]
    found = list(advantages_of(groups, config_of(advantage), parts).values())
    whole = [[reward for part in prompt for reward in part] for prompt in parted]
    expected = [one for prompt in whole for one in slow_advantages(prompt, advantage)]
    assert np.allclose(found, expected, atol=1e-5)
    joined = advantages_of([group(prompt) for prompt in whole], config_of(advantage))
    assert list(joined.values()) == found, "the same bits as one group of all"
    equal = sum(len(set(prompt)) == 1 for prompt in whole) / len(whole)
    assert math.isclose(GroupStatistics.of(groups, parts).zero_advantage, equal)


def test_parts_that_do_not_add_up_are_refused():
    with pytest.raises(BugError, match="add up to 3, not 2"):
        prompts_of([group([1.0]), group([0.0])], [2, 1])


def slow_pull(rate, rules):
    """Returns the mean that a prompt adds along s₁ and along s₀: sums over every sequence of
    outcomes, where a success has score s₁, a failure s₀, and advantages are ``group_mean``."""
    pull = np.zeros(2)

    def visit(outcomes, probability):
        nonlocal pull
        outcome = PromptOutcome.of([float(one) for one in outcomes], success_at=1.0)
        decision = decide(rules, outcome, defers=9)
        if decision.verdict == "fill":
            for more in itertools.product((0, 1), repeat=decision.more):
                share = rate ** sum(more) * (1 - rate) ** (len(more) - sum(more))
                visit((*outcomes, *more), probability * share)
        elif decision.verdict == "train":
            found = advantages_of([group([float(r) for r in outcomes])], config_of("group_mean"))
            for reward, advantage in zip(outcomes, found.values(), strict=True):
                pull[0 if reward else 1] += probability * advantage

    for first in itertools.product((0, 1), repeat=rules.pilot):
        visit(first, rate ** sum(first) * (1 - rate) ** (rules.pilot - sum(first)))
    return pull


def weight(rate, rules):
    """E[k(n − k)/n] over pilots that are filled to ``largest``: the formula of the documents."""
    total, n, a = 0.0, rules.largest, rules.pilot
    for k in range(a + 1):
        outcome = PromptOutcome.of([1.0] * k + [0.0] * (a - k), success_at=1.0)
        if decide(rules, outcome, defers=9).verdict != "fill":
            continue
        pilot = math.comb(a, k) * rate**k * (1 - rate) ** (a - k)
        for more in range(n - a + 1):
            fill = math.comb(n - a, more) * rate**more * (1 - rate) ** (n - a - more)
            successes = k + more
            total += pilot * fill * successes * (n - successes) / n
    return total


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_choosing_sizes_by_rewards_changes_weights_and_no_directions(rate):
    rules = AllocationConfig(policy="pilot", pilot=2, largest=5, skip_above=0.6, defer_below=0.3)
    along = slow_pull(rate, rules)
    assert np.isclose(along[0], -along[1]), "it adds a multiple of s₁ − s₀, as an unbiased one does"
    assert np.isclose(along[0], weight(rate, rules))
    assert along[0] > 0
