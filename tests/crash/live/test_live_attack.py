"""Users who lie together, with and without limits, and critics."""

import pytest

from benchmarks.live.bandit import UNLIMITED, attacked, config_of, critics_trained, learn

SHARE, SHIFT = 0.05, 0.15
SECONDS = 200


@pytest.mark.drills
@pytest.mark.long
def test_one_liar_in_twenty_takes_little_of_the_gain_and_all_of_it_without_limits():
    honest = learn(attacked(0, 0.0), config_of(), seconds=SECONDS)
    limited = learn(attacked(0, SHARE), config_of(), seconds=SECONDS)
    unlimited = learn(attacked(0, SHARE), config_of(**UNLIMITED), seconds=SECONDS)
    assert honest.gain > 0.2
    assert limited.gain >= (1 - SHIFT) * honest.gain
    assert unlimited.gain < (1 - SHIFT) * honest.gain


@pytest.mark.drills
def test_critics_are_trained_on():
    assert critics_trained(0) >= 0.95
