"""The section of thinking budgets: what it refuses, and which budgets hold when."""

import pytest

from deltawire.config import parse_config
from deltawire.errors import InputError

GOOD = {"end": "</t>", "budgets": [8], "answer_tokens": 4}


def parsed(thinking, **rollout):
    rollout = {"max_tokens": 64, "context": 256} | rollout
    raw = {"name": "run", "model": {"build": {}}, "rollout": {**rollout, "thinking": thinking}}
    return parse_config(raw, source="file.toml").rollout.thinking


@pytest.mark.parametrize(
    ("thinking", "words"),
    [
        ({"budgets": [0]}, "budgets"),
        ({"budgets": []}, "budgets"),
        ({"budgets": [61]}, "take 65 tokens, rollout.max_tokens = 64"),
        ({"weights": [1.0, 2.0]}, "weights and budgets differ"),
        ({"start": "<t>", "end": ""}, "rollout.thinking.start has no end"),
        ({"closing": "enough.</t>"}, "closing contains the mark '</t>'"),
        ({"tell": "Think briefly."}, "does not say the budget"),
        (
            {
                "schedule": [
                    {"from_version": 9, "budgets": [4]},
                    {"from_version": 3, "budgets": [5]},
                ]
            },
            "versions do not rise",
        ),
        ({"schedule": [{"from_version": 9, "budgets": [61]}]}, "take 65 tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_contradictions_are_one_clear_error(thinking, words):
    with pytest.raises(InputError) as caught:
        parsed(GOOD | thinking)
    text = str(caught.value)
    assert words in text
    assert len(text.splitlines()) == 1


def test_a_budget_of_0_is_refused():
    with pytest.raises(InputError, match=r"Expected `int` >= 1 - at `rollout.thinking.budgets"):
        parsed(GOOD | {"budgets": [0]})


def test_a_budget_above_the_context_is_refused():
    with pytest.raises(InputError, match=r"a budget of 300 exceeds rollout\.context = 256"):
        parsed(GOOD | {"budgets": [300]}, max_tokens=1000)


def test_a_schedule_replaces_the_budgets():
    later = [{"from_version": 10, "budgets": [16, 32], "weights": [3.0, 1.0]}]
    config = parsed(GOOD | {"schedule": later})
    assert config.stage_at(9).budgets == [8]
    assert config.stage_at(10).budgets == [16, 32]
    assert config.largest == 32
    assert config.allowed == {8, 16, 32}
