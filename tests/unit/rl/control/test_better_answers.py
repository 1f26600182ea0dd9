"""A trainer reads better answers of learners only, within the bounds of its run."""

from dataclasses import replace

import numpy as np
import pytest

from deltawire.config import parse_config
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.wire.rollouts import LIVE_TASK, BetterAnswer

CONTEXT = 12


def bounds_of(kind):
    raw = {
        "name": "run",
        "model": {"path": "/m"},
        "rollout": {"context": CONTEXT, "max_tokens": 4, "group_size": 2},
        "train": {"loss": {"preference": {"kind": kind}}},
    }
    return Bounds.of(parse_config(raw, source="test"), 100)


def paired(make_group, tokens):
    made = make_group("w", [0, 0], task=LIVE_TASK)
    better = BetterAnswer(np.array(tokens, np.int32), 1.0)
    first = replace(made.trajectories[0], episode=0, better=better)
    return replace(made, trajectories=[first, made.trajectories[1]])


def test_better_answers_within_the_bounds_are_read(make_group):
    whole = paired(make_group, [5] * (CONTEXT - 1))
    assert bounds_of("dpo").fault(whole) == ""
    assert bounds_of("dpo").bytes > bounds_of("none").bytes


@pytest.mark.parametrize(
    ("tokens", "task", "kind", "reason"),
    [
        ([5], LIVE_TASK, "none", "which this run does not train on"),
        ([5], "t", "dpo", "which this run does not train on"),
        ([5] * CONTEXT, LIVE_TASK, "dpo", f"more than {CONTEXT} tokens"),
        ([100], LIVE_TASK, "dpo", "token"),
    ],
)
def test_other_better_answers_are_refused(make_group, tokens, task, kind, reason):
    made = replace(paired(make_group, tokens), task=task)
    assert reason in bounds_of(kind).fault(made)
