"""Each length term against a twin that is written from its paper, one episode at a time."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.config import LengthTerm, parse_config
from deltawire.errors import CorruptError, InputError
from deltawire.train.loss.lengths import TERMS, EpisodeLengths, with_length_terms
from deltawire.train.step import advantages_of
from deltawire.wire.rollouts import Group, Thinking, Trajectory

episode = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(1, 50),
    st.integers(0, 2),
)
episodes = st.lists(episode, min_size=1, max_size=12)


def term_of(kind, **keys):
    return msgspec.convert({"kind": kind, **keys}, LengthTerm)


def both(rows, term, naive):
    rewards, drawn, thought, budget, groups = (np.array(part) for part in zip(*rows, strict=True))
    of = EpisodeLengths(drawn.astype(float), thought.astype(float), budget.astype(float), groups)
    found = TERMS[term.kind](rewards.astype(float), of, term, 48)
    np.testing.assert_allclose(found, [naive(*row) for row in rows], atol=1e-12)


@given(episodes, st.integers(1, 40), st.integers(0, 40))
def test_overlong(rows, cushion, above):
    limit = cushion + above

    def naive(reward, drawn, *_):
        if drawn <= limit - cushion:
            return reward
        return reward + (((limit - cushion) - drawn) / cushion if drawn <= limit else -1.0)

    both(rows, term_of("overlong", limit=limit, cushion=cushion), naive)


@given(episodes)
def test_overlong_without_a_limit_has_that_of_the_run(rows):
    def naive(reward, drawn, *_):
        return reward - min(1.0, max(0.0, (drawn - 40) / 8))

    both(rows, term_of("overlong", cushion=8), naive)


@given(episodes, st.floats(1e-4, 0.1))
def test_l1_exact(rows, alpha):
    both(rows, term_of("l1_exact", alpha=alpha), lambda r, _, n, b, __: r - alpha * abs(b - n))


@given(episodes, st.floats(1e-4, 0.1), st.floats(0, 1))
def test_l1_max(rows, alpha, delta):
    def naive(reward, _, thought, budget, __):
        return reward * min(1.0, max(0.0, alpha * (budget - thought) + delta))

    both(rows, term_of("l1_max", alpha=alpha, delta=delta), naive)


@given(episodes, st.floats(1e-3, 1.0))
def test_group_share(rows, alpha):
    def naive(reward, drawn, _, __, group):
        members = [row for row in rows if row[4] == group]
        mean = sum(row[0] for row in members) / len(members)
        return reward - alpha * mean * drawn / max(row[1] for row in members)

    both(rows, term_of("group_share", alpha=alpha), naive)


def trajectory(count, reward, *, episode=-1, thinking=None):
    return Trajectory(
        np.full(count, 65, np.int32), np.full(count, -1, np.float32), np.zeros(count, np.int32),
        np.ones(count, np.uint8), reward, "stop", episode=episode, thinking=thinking,
    )  # fmt: skip


def group_of(*trajectories):
    return Group("w0", "n", "t", 1.0, np.array([66], np.int32), list(trajectories))


def config_of(*terms, **rollout):
    raw = {"name": "run", "model": {"build": {}}, "rollout": {"max_tokens": 48, **rollout}}
    loss = {"lengths": list(terms), "advantage": "group_mean"}
    return parse_config({**raw, "train": {"loss": loss}}, source="test")


def test_advantages_are_those_of_the_changed_rewards():
    """Segments of one episode count together, and terms apply in order."""
    group = group_of(
        trajectory(30, 1.0, episode=0), trajectory(15, 1.0, episode=0), trajectory(10, 1.0)
    )
    terms = ({"kind": "overlong", "cushion": 8}, {"kind": "group_share", "alpha": 0.5})
    found = advantages_of([group], config_of(*terms))
    first, second = 1 - 5 / 8, 1.0
    mean = (first + second) / 2
    first, second = first - 0.5 * mean, second - 0.5 * mean * 10 / 45
    assert found[0, 0] == pytest.approx(first - (first + second) / 2)
    assert found[0, 1] == pytest.approx(second - (first + second) / 2)
    assert list(advantages_of([group], config_of()).values()) == [0.0, 0.0]


def test_budgets_come_from_the_thinking():
    thinking = [Thinking(8, ((count, "answered"),)) for count in (2, 8)]
    group = group_of(*(trajectory(20, 1.0, thinking=one) for one in thinking))
    marks = {"end": "</t>", "budgets": [8], "answer_tokens": 4}
    config = config_of({"kind": "l1_max", "alpha": 0.1}, thinking=marks)
    rewards = {(0, 0): 1.0, (0, 1): 1.0}
    found = with_length_terms(rewards, [group], config)
    assert found == pytest.approx({(0, 0): 1.0, (0, 1): 0.5})
    with pytest.raises(CorruptError, match="no thinking budget"):
        with_length_terms(rewards, [group_of(*[trajectory(20, 1.0)] * 2)], config)


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ({"kind": "overlong"}, "lengths[0]: overlong has no cushion"),
        ({"kind": "overlong", "cushion": 49}, "a cushion of 49 exceeds the limit of 48"),
        ({"kind": "l1_max"}, "l1_max needs thinking budgets"),
        ({"kind": "shorter"}, "shorter"),
    ],
)
def test_wrong_terms_are_one_clear_error(term, words):
    with pytest.raises(InputError) as caught:
        config_of(term)
    assert words in str(caught.value)
