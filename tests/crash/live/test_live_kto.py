"""KTO learns from accepted and rejected answers of simulated users, by the learner's own code."""

import msgspec
import pytest

from benchmarks.live.bandit import HONEST, KTO, config_of, learn
from deltawire.testing.users import Population


@pytest.mark.drills
@pytest.mark.long
def test_kto_brings_users_most_of_what_the_best_policy_would():
    settings = msgspec.structs.replace(HONEST, seed=3)
    learned = learn(settings, config_of(KTO, baseline="sign"), seconds=120)
    best = Population(settings).tastes().max(axis=1).mean()
    assert learned.gain > 0.6 * (best - learned.first) > 0.1
