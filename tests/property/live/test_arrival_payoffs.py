"""No bettor gains on average from arms that differ by no more than the null hypothesis allows,
whatever outcomes do meanwhile: the expected wealth over all assignments is at most 1, exactly."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.live.release.sequential_tests import ArrivalDifference

UNIT = st.floats(0, 1)
USERS = 7


@st.composite
def worlds(draw):
    """Outcomes of each user in both arms, and the candidate's share when the user came. The
    candidate's outcome exceeds the other by at most the tolerance."""
    tolerance = draw(st.floats(-0.9, 0.9))
    users = []
    for _ in range(USERS):
        serving = draw(st.floats(max(0.0, -tolerance), min(1.0, 1 - tolerance)))
        most = min(serving + tolerance, 1.0)
        users.append((max(most - draw(st.sampled_from([0.0, 0.1])), 0.0), serving))
    shares = sorted(draw(st.lists(st.floats(0.01, 0.99), min_size=USERS, max_size=USERS)))
    return tolerance, np.array(users), np.array(shares)


@settings(max_examples=200, deadline=None)
@given(worlds(), st.booleans(), st.booleans())
def test_expected_wealth_is_at_most_one_at_every_look(world, falls, adapts):
    tolerance, users, shares = world
    mine, theirs = users.T
    if falls:  # The mirrored test: the serving version exceeds the candidate.
        mine, theirs = theirs, mine
    arms = np.array(list(itertools.product([0.0, 1.0], repeat=USERS)))
    outcomes = np.where(arms == 1, mine, theirs)
    if adapts:  # Later levels depend on whom the candidate answered before.
        crowd = (np.cumsum(arms, axis=1) - arms > 2) * (np.minimum(mine, theirs).min() / 2)
        outcomes = outcomes - crowd
    test = ArrivalDifference(tolerance=tolerance, sign=-1 if falls else 1, shape=(len(arms),))
    path = test.add(arms, outcomes, shares)
    chances = np.where(arms == 1, shares, 1 - shares).prod(axis=1)
    assert chances.sum() == pytest.approx(1)
    assert np.isfinite(path).all()
    assert (chances @ np.exp(path) <= 1 + 1e-9).all()
