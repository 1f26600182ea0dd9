"""2 % liars and a coordinated cohort: how much of the honest gain they take, with limits and
without."""

import msgspec
import pytest

from benchmarks.live.bandit import ATTACK, HONEST, UNLIMITED, config_of, learn

SHIFT = 0.1
SECONDS = 200


@pytest.mark.drills
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_liars_and_a_cohort_take_at_most_a_tenth_of_the_gain(seed):
    honest = msgspec.structs.replace(HONEST, seed=seed)
    attacked = msgspec.structs.replace(honest, **ATTACK)
    alone = learn(honest, config_of(), seconds=SECONDS)
    limited = learn(attacked, config_of(), seconds=SECONDS)
    unlimited = learn(attacked, config_of(**UNLIMITED), seconds=SECONDS)
    assert alone.gain > 0.2
    assert limited.gain >= (1 - SHIFT) * alone.gain
    # The limits are what keeps them out: without them, attackers are far more of the data.
    assert limited.of_attackers / limited.trained < 0.8 * unlimited.of_attackers / unlimited.trained
    assert limited.cohorts_out == 1
