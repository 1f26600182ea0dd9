"""Canaries in worlds that drift: the error rates hold, and pairing by rank breaks them."""

import numpy as np
import pytest

from benchmarks.live import canary
from benchmarks.live.canary import (
    GUARDED_RATES,
    WORLDS,
    bounds,
    chosen_worlds,
    kept_counts,
    simulate,
)
from benchmarks.training.keys import Options
from deltawire.config.release import DEFAULT_GUARDRAILS, ReleaseConfig
from deltawire.errors import InputError
from deltawire.live.release.sequential_tests import log_evidence_path, log_threshold

RELEASE = ReleaseConfig(stages=[0.1, 0.5], guardrails={})
CANARIES = 100
MOST = 12
"""Of 100 canaries, 0.05 and more than 3 standard deviations."""


@pytest.mark.parametrize("world", list(WORLDS))
def test_error_rates_hold_in_every_world(world):
    facts = {"world": world, "canaries": CANARIES, "count": 4000}
    bad = simulate(RELEASE, -RELEASE.margin, seed=1, **facts)
    same = simulate(RELEASE, 0.0, seed=2, **facts)
    assert bad.promoted.sum() <= MOST
    assert same.rolled_back.sum() <= MOST


def test_the_order_in_which_answers_end_breaks_them():
    """The guard is off: the slower arm's outcomes count later than those of the same moment, and
    the level of all users falls or rises meanwhile."""
    facts = {"world": "slow_and_fast_arms", "canaries": CANARIES, "count": 12_000, "order": "end"}
    bad = simulate(RELEASE, -RELEASE.margin, seed=1, **facts)
    same = simulate(RELEASE, 0.0, seed=2, **facts)
    assert bad.promoted.sum() > MOST
    assert same.rolled_back.sum() > MOST


def test_users_who_vote_promote_only_if_they_know_their_arm():
    release = ReleaseConfig(stages=[0.5], guardrails={})
    hidden, known = (
        simulate(release, -0.04, seed=4, canaries=CANARIES, count=6000, guess=guess)
        for guess in (0.5, 1.0)
    )
    assert hidden.promoted.sum() <= MOST
    assert known.promoted.sum() > 2 * MOST


def test_pairing_outcomes_by_rank_breaks_them():
    """The guard is off: the k-th outcome of one arm is paired with those of the other of the same
    rank, so that a level that changes looks like a difference."""
    rng = np.random.default_rng(3)
    level = WORLDS["sites"](rng, 100, 8000)
    rejected = 0
    for one in level:
        mine = rng.random(8000) < 0.1
        drawn = (rng.random(8000) < one).astype(float)
        theirs = drawn[~mine]
        count = min(int(mine.sum()), len(theirs) // 9)
        paired = drawn[mine][:count] - theirs[: 9 * count].reshape(count, 9).mean(axis=1)
        rejected += log_evidence_path(paired, tolerance=0.0, sign=-1).max() >= log_threshold(0.05)
    assert rejected > MOST


def test_worlds_are_chosen_by_name_and_a_world_that_is_done_is_read(tmp_path):
    assert chosen_worlds("all") == list(WORLDS)
    assert chosen_worlds("bursts,seasons") == ["bursts", "seasons"]
    with pytest.raises(InputError, match="no 'tides'"):
        chosen_worlds("seasons,tides")
    options = Options(out=str(tmp_path), canaries=7)
    (tmp_path / "canary-counts-seasons-7-10.json").write_text('{"false_promotion": 5}')
    found = kept_counts("seasons", ReleaseConfig(), options)
    assert found == {"false_promotion": 5}, "it was simulated again"


def test_both_ends_of_an_interval_are_those_of_wilson():
    """Each end is the rate whose own standard deviation, 1.6449 times, reaches to what was seen."""
    for hits, trials in ((0, 2000), (33, 2000), (1996, 2000)):
        low, high = bounds(hits, trials)
        rate = hits / trials
        for end in (low, high):
            assert abs(rate - end) == pytest.approx(
                1.6449 * (max(end * (1 - end), 0) / trials) ** 0.5, abs=1e-7
            )
        assert low < rate < high or not hits


def test_canaries_are_simulated_with_all_guardrails():
    assert GUARDED_RATES.keys() == DEFAULT_GUARDRAILS.keys()
    simulate(ReleaseConfig(), 0.0, seed=1, canaries=2, count=300)


def test_canaries_that_have_ended_are_left_out_without_a_change_of_the_others(monkeypatch):
    """Small stretches leave canaries out early; one stretch leaves none out."""
    facts = {"world": "sites", "canaries": 30, "count": 6000}
    unguarded = ReleaseConfig(stages=[0.5], guardrails={})
    ends = []
    for stretch in (200, 6000):
        monkeypatch.setattr(canary, "STRETCH", stretch)
        ends.append(simulate(unguarded, 0.01, seed=6, **facts))
    early, late = ends
    assert 0 < early.promoted.sum() < 30, "some end, and some go on"
    for one, other in zip(early, late, strict=True):
        np.testing.assert_array_equal(one, other)
