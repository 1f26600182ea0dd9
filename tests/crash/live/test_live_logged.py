"""The learner improves on the policy whose log it learns from, where the log can show it."""

import numpy as np
import pytest

from benchmarks.live.logged import evaluate
from deltawire.testing.bandit_logs import LoggedRound, read_bandit_log, write_bandit_log

ITEMS, POSITIONS = 20, 3


def made_up_log(rounds, *, rates):
    """Rounds of a policy that draws items by fixed shares, clicked with the rates of each pair."""
    chance = np.random.default_rng(0)
    shares = chance.dirichlet(np.full(ITEMS, 5.0))
    for number in range(rounds):
        position = int(chance.integers(POSITIONS))
        item = int(chance.choice(ITEMS, p=shares))
        click = bool(chance.random() < rates[position, item])
        yield LoggedRound(1.57e9 + number, item, position, click, float(shares[item]))


def learned_from(folder, rates):
    write_bandit_log(folder, made_up_log(4000, rates=rates))
    return evaluate("made up", read_bandit_log(folder))


@pytest.mark.drills
def test_what_is_learned_from_a_log_is_better_on_its_later_rounds(tmp_path):
    spread = np.random.default_rng(1).standard_normal((POSITIONS, ITEMS))
    found = learned_from(tmp_path, np.minimum(0.05 * np.exp(spread), 0.9))
    assert found.errors > 3
    assert found.effective > 300


@pytest.mark.drills
def test_a_log_without_anything_to_learn_promises_nothing(tmp_path):
    found = learned_from(tmp_path, np.full((POSITIONS, ITEMS), 0.08))
    assert abs(found.errors) < 3
