"""The cost of a policy: causes, lengths and families, against sums by hand."""

from dataclasses import replace

import pytest

from deltawire.estimates import FamilyCounts
from deltawire.rl.control.drop_bias import (
    MAX_CAUSES,
    MAX_FAMILIES,
    OTHERS,
    causes_of,
    cost_of,
    failures_of,
    families_of,
)
from deltawire.rl.control.rollout_buffer import Batch, BufferedGroup, Drop


@pytest.fixture
def batch(make_group):
    """``batch(trained, dropped)``: families of groups of four tokens, and (family, tokens) of those
    that were too old."""

    def make(trained, dropped=(), extra=()):
        taken = [
            BufferedGroup(n, replace(make_group("w", [0, 0]), family=family))
            for n, family in enumerate(trained)
        ]
        drops = [
            Drop("w", 100 + n, "stale", family=family, tokens=tokens)
            for n, (family, tokens) in enumerate(dropped)
        ]
        return Batch(taken, [0] * len(taken), [*drops, *extra])

    return make


def cost(*batches):
    return cost_of(
        [families_of(b) for b in batches],
        [causes_of(b) for b in batches],
        [failures_of(b) for b in batches],
    )


def test_dropping_the_long_shortens_the_mix(batch):
    found = cost(batch(["sum", "sum"], [("proof", 40)]), batch(["sum", "proof"], [("proof", 24)]))
    assert found.length_trained == 4.0
    assert found.length_dropped == 32.0
    assert found.length_skew == pytest.approx(4 / ((4 * 4 + 64) / 6) - 1)
    # Trained: sum 3/4, proof 1/4. Finished: sum 3/6, proof 3/6.
    assert found.family_distance == pytest.approx(0.25)
    assert found.dropped == {"stale": 2}


def test_nothing_dropped_costs_nothing(batch):
    found = cost(batch(["a", "b"]), batch(["b"]))
    assert (found.length_skew, found.family_distance) == (0.0, 0.0)
    assert found.length_dropped is None
    assert found.dropped == found.episodes_failed == {}


def test_a_run_without_a_step_has_no_figures():
    found = cost()
    assert found.length_trained is found.length_skew is found.family_distance is None


def test_what_failed_is_counted_by_cause_and_skews_nothing(batch):
    extra = [
        Drop("w", 1, "failed", "tool: 100 MB", family="x", tokens=999),
        Drop("w", 2, "failed", "tool: 100 MB"),
        Drop("w", 3, "damaged"),
    ]
    found = cost(batch(["a"], extra=extra))
    assert found.dropped == {"failed: tool: 100 MB": 2, "damaged": 1}
    assert found.length_skew == found.family_distance == 0.0


def test_episodes_that_trained_groups_went_without(batch):
    made = batch(["a"])
    t = made.taken[0].group.trajectories
    t[0] = replace(t[0], cause="timeout", episode=5)
    t.append(replace(t[0], cause="timeout"))  # a second segment of the same episode
    t.append(replace(t[1], cause="reward raised"))
    assert failures_of(made) == {"timeout": 1, "reward raised": 1}


def test_a_bucket_cannot_fill_the_events_with_names(batch):
    made = batch([f"family {n}" for n in range(500)])
    found = families_of(made)
    assert len(found) == MAX_FAMILIES + 1
    assert found[OTHERS].trained == 500 - MAX_FAMILIES
    drops = [Drop("w", n, "failed", f"{n} " + "x" * 500) for n in range(100)]
    causes = causes_of(batch(["a"], extra=drops))
    assert len(causes) == MAX_CAUSES + 1
    assert sum(causes.values()) == 100
    assert max(map(len, causes)) <= 120


def test_counts_of_a_family_add_up(batch):
    assert families_of(batch(["a", "a"], [("a", 7)])) == {"a": FamilyCounts(2, 8, 1, 7)}
