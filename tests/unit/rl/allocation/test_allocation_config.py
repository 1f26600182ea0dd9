"""Wrong settings of allocation: one clear error each."""

import pytest

from deltawire.config import parse_config
from deltawire.errors import InputError

BAND = {"up_to": 0.5, "weight": 1.0}


def parsed(allocation, rollout=None, train=None):
    return parse_config(
        {
            "name": "allocated",
            "model": {"path": "m"},
            "rollout": {"allocation": allocation, **(rollout or {})},
            "train": train or {},
        },
        source="file.toml",
    )


@pytest.mark.parametrize(
    ("allocation", "rollout", "train", "words"),
    [
        ({"policy": "pilots"}, {}, {}, "pilots"),
        ({"policy": "pilot", "pilot": 40}, {}, {}, "pilot = 40 exceeds largest = 32"),
        ({"policy": "pilot", "pilot": 1}, {}, {}, "pilot"),
        ({"policy": "pilot", "skip_above": 0.1}, {}, {}, "no prompt would be filled"),
        ({"policy": "knapsack", "pilot": 8}, {"group_size": 8}, {}, "leaves nothing"),
        ({"bands": [BAND]}, {}, {}, "need a policy that observes pass rates"),
        ({"policy": "pilot", "bands": [BAND, BAND]}, {}, {}, "up_to does not rise"),
        ({"policy": "pilot", "bands": [{**BAND, "weight": 0.0}]}, {}, {}, "every weight is 0"),
        ({"policy": "pilot", "discount": 1.0}, {}, {}, "discount"),
        (
            {"policy": "pilot"},
            {},
            {"staleness": {"policy": "windowed_fifo"}},
            "leave no gap-free order for windowed_fifo",
        ),
        ({"policy": "pilot"}, {}, {"loss": {"advantage": "given"}}, "takes them as advantages"),
        ({"policy": "pilot"}, {}, {"groups_per_step": 2049}, "records of 2,048 prompts"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(allocation, rollout, train, words):
    with pytest.raises(InputError) as caught:
        parsed(allocation, rollout, train)
    text = str(caught.value)
    assert words in text
    assert len(text.splitlines()) == 1


def test_fixed_is_the_default_and_asks_for_the_group_size():
    rollout = parsed({}, {"group_size": 6}).rollout
    assert rollout.allocation.policy == "fixed"
    assert (rollout.allocation.first(6), rollout.allocation.most(6)) == (6, 6)
    assert parsed({"policy": "refill"}).rollout.allocation.most(6) == 6
    assert parsed({"policy": "pilot"}).rollout.allocation.first(6) == 4
