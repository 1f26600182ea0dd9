"""The division into micro-batches: complete, within the budget, balanced, and a pure function."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.train.batch import collate
from deltawire.train.budget import divide
from deltawire.train.layout import lay_out
from deltawire.wire.rollouts import Group, Trajectory


def group(number, prompt, lengths, *, segments=1):
    """A group whose episodes are ``segments`` trajectories each."""
    rng = np.random.default_rng(number)
    return Group(
        "w",
        "n",
        "t",
        1.0,
        rng.integers(0, 60, prompt).astype(np.int32),
        [
            Trajectory(
                rng.integers(0, 60, length).astype(np.int32),
                np.full(length, -1, np.float32),
                np.zeros(length, np.int32),
                np.ones(length, np.uint8),
                0.0,
                "stop",
                episode=place // segments,
            )
            for place, length in enumerate(lengths)
        ],
    )


GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(
    sizes=GROUPS,
    budget=st.sampled_from([1, 40, 120, 10_000]),
    ranks=st.integers(1, 3),
    packed=st.booleans(),
    segments=st.integers(1, 2),
)
def test_every_trajectory_once_within_the_budget(sizes, budget, ranks, packed, segments):
    groups = [group(n, *size, segments=segments) for n, size in enumerate(sizes)]
    found = divide(groups, budget=budget, ranks=ranks, packed=packed)
    assert found == divide(groups, budget=budget, ranks=ranks, packed=packed)
    assert len(found) == ranks
    assert len({len(batches) for batches in found}) == 1
    batches = [members for rank in found for members in rank]
    every = [(n, place) for n, one in enumerate(groups) for place, _, _ in one.trained()]
    assert sorted(member for members in batches for member in members) == every
    homes = {}
    for number, members in enumerate(batches):
        assert members == sorted(members)
        if not members:
            assert ranks > 1
            continue
        episodes = {(n, groups[n].episodes[place]) for n, place in members}
        for episode in episodes:
            assert homes.setdefault(episode, number) == number, "an episode was split"
        layout = lay_out(collate(groups, members), packed=packed)
        assert layout.ids_RS.numel() <= budget or len(episodes) == 1


def test_ranks_are_balanced():
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(256), 0.84, 64)).astype(int) + 1
    groups = [group(n, 8, [int(length)]) for n, length in enumerate(lengths)]
    found = divide(groups, budget=4096, ranks=4)
    loads = [sum(lengths[n] for members in rank for n, _ in members) for rank in found]
    assert max(loads) < 1.1 * min(loads)


def test_a_group_stays_together_if_it_fits():
    groups = [group(n, 30, [10] * 4) for n in range(6)]
    for members in divide(groups, budget=140)[0]:
        numbers = [n for n, _ in members]
        assert all(numbers.count(n) == 4 for n in numbers)


def test_chosen_groups_only():
    groups = [group(n, 3, [5, 5]) for n in range(4)]
    (batches,) = divide(groups, budget=1000, chosen=[1, 3])
    assert batches == [[(1, 0), (1, 1), (3, 0), (3, 1)]]
