"""Budget-relative advantages against a twin that is written from the paper, number by number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from deltawire.train.loss.anytime import answer_advantages, thought_advantages

sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
rewards = sizes.flatmap(
    lambda shape: arrays.arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.25, 1.0]))
)


def naive_thoughts(rewards, prior, discount):
    """AnytimeReasoner, section 3.3: R, V₁, V₂ and their mix, for budgets 1 … m of the paper."""
    thoughts, budgets = len(rewards), len(prior)
    share = [weight / sum(prior) for weight in prior]
    mean = [[sum(answers) / len(answers) for answers in thought] for thought in rewards]

    def after(h, j):
        return sum(share[i - 1] * mean[h][i - 1] for i in range(j, budgets + 1))

    found = []
    for h in range(thoughts):
        row = []
        for j in range(1, budgets + 1):
            first = 0.0
            if j > 1:
                weights = {i: discount ** (j - i) for i in range(1, j)}
                before = sum(weights[i] * mean[h][i - 1] for i in weights) / sum(weights.values())
                first = before * sum(share[j - 1 :])
            second = sum(after(i, j) for i in range(thoughts)) / thoughts
            value = (j - 1) / budgets * first + (budgets - j + 1) / budgets * second
            row.append(after(h, j) - value)
        found.append(row)
    return found


@given(rewards, st.floats(0.1, 1.0), st.data())
def test_thoughts(rewards_HSA, discount, data):
    prior = data.draw(
        st.lists(st.floats(0.1, 5), min_size=rewards_HSA.shape[1], max_size=rewards_HSA.shape[1])
    )
    found = thought_advantages(rewards_HSA, np.array(prior), discount)
    naive = naive_thoughts(rewards_HSA.tolist(), prior, discount)
    np.testing.assert_allclose(found, naive, atol=1e-12)


@given(rewards)
def test_answers(rewards_HSA):
    found = answer_advantages(rewards_HSA)
    for h, s, a in np.ndindex(*rewards_HSA.shape):
        others = rewards_HSA[h, s] if rewards_HSA.shape[2] > 1 else rewards_HSA[:, s, 0]
        assert found[h, s, a] == pytest.approx(rewards_HSA[h, s, a] - sum(others) / len(others))


@given(rewards, st.data())
def test_a_thought_that_lacks_an_answer_changes_no_other(rewards_HSA, data):
    """It has no advantage, and the others have those of a group without it."""
    h = data.draw(st.integers(0, len(rewards_HSA) - 1))
    prior = np.ones(rewards_HSA.shape[1])
    lacking = rewards_HSA.copy()
    lacking[h, 0, 0] = np.nan
    found = thought_advantages(lacking, prior, 0.5)
    assert (found[h] == 0).all()
    if len(rewards_HSA) > 1:
        others = thought_advantages(np.delete(rewards_HSA, h, 0), prior, 0.5)
        np.testing.assert_allclose(np.delete(found, h, 0), others, atol=1e-12)
    answers = answer_advantages(lacking)
    assert np.isnan(answers).sum() == 1


def test_a_thought_that_turns_right_early_gains_in_its_first_part():
    """Right from the second budget on: the tokens up to it are praised, the ones after are not."""
    rewards_HSA = np.array([[[0.0], [1.0], [1.0]], [[0.0], [0.0], [0.0]]])
    right, wrong = thought_advantages(rewards_HSA, np.ones(3), 0.5)
    np.testing.assert_allclose(
        right, [1 / 3, 2 / 3 - 2 / 3 / 3, 1 / 3 - (2 / 3 * 2 / 3 / 3 + 1 / 18)]
    )
    assert wrong[0] == pytest.approx(-1 / 3)
    assert right[2] < right[1]
