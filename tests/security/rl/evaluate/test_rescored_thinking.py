"""Groups with thinking budgets are played again: honest ones agree, and a false budget, inserted
tokens in the loss, or a close before its time are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from honest_groups import CONFIG, HonestRun

from deltawire.rl.control.rollout_reader import Bounds
from deltawire.rl.evaluate.recorded_model import RecordedModel
from deltawire.rl.evaluate.rescoring import GroupChecker
from deltawire.wire.rollouts import Thinking

THINKING = {
    "end": ")", "budgets": [3, 5], "per": "episode", "answer_tokens": 6, "closing": "so"
}  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    rollout = {**CONFIG["rollout"], "max_tokens": 16, "thinking": THINKING}
    run = HonestRun(tmp_path_factory.mktemp("model"), {**CONFIG, "rollout": rollout})
    run.step()
    return run


@pytest.fixture(scope="module")
def checker(honest):
    model = RecordedModel(honest.bucket, honest.run, honest.config, honest.folder)
    return GroupChecker(honest.config, honest.tasks, honest.text, model)


def test_an_honest_group_agrees(honest, checker):
    forced = 0
    for number in range(4):
        group = honest.group(number)
        forced += sum(bool(t.thinking.forced) for t in group.trajectories)
        verdict = honest.judged(checker, group, number)
        assert (verdict.kind, verdict.detail) == ("", "")
    assert forced >= 4
    assert checker.unjudged == []


def _budget(t, budget):
    return replace(t, thinking=replace(t.thinking, budget=budget))


def _drawn(t):
    """Inserted tokens as drawn ones: the model would learn to close its thinking early."""
    mask_T = np.ones_like(t.mask_T)
    return replace(t, mask_T=mask_T, thinking=replace(t.thinking, forced=()))


def _early(t):
    """Thinking that is closed one token before the budget is spent."""
    (start, end), *_ = t.thinking.forced
    keep = np.r_[0 : start - 1, start : len(t.tokens_T)]
    thinking = Thinking(t.thinking.budget, t.thinking.turns, ((start - 1, end - 1),))
    cut = {
        f"{name}_T": getattr(t, f"{name}_T")[keep]
        for name in ("tokens", "logprobs", "versions", "mask")
    }
    return replace(t, thinking=thinking, **cut)


BEYOND = {
    "no budget": (lambda t: replace(t, thinking=None), "no thinking budget"),
    "another budget": (lambda t: _budget(t, 4), "a thinking budget of 4"),
    "too much thinking": (
        lambda t: replace(t, thinking=replace(t.thinking, turns=((6, "answered"),))),
        "thinks more than its budget",
    ),
}


@pytest.mark.parametrize("what", BEYOND)
def test_a_group_beyond_its_budgets_is_not_read(honest, what):
    """It would stop a trainer whose loss reads budgets."""
    change, words = BEYOND[what]
    group, bounds = honest.group(1), Bounds.of(honest.config, 300)
    assert bounds.fault(group) == ""
    forged = replace(group, trajectories=[change(t) for t in group.trajectories])
    assert words in bounds.fault(forged)
    failed = [replace(change(t), cause="it failed", reward=0.0) for t in group.trajectories]
    assert bounds.fault(replace(group, trajectories=failed)) == ""


LIES = {
    "a budget that the run does not have": (lambda t: _budget(t, 4), "budget"),
    "another budget of the run": (lambda t: _budget(t, 8 - t.thinking.budget), "prompt"),
    "no thinking": (lambda t: replace(t, thinking=None), "budget"),
    "inserted tokens as drawn": (_drawn, "prompt"),
    "an early close": (_early, "prompt"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(honest, checker, lie):
    group, (change, kind) = honest.group(1), LIES[lie]
    assert sum(bool(t.thinking.forced) for t in group.trajectories) >= 2
    told = [change(t) if t.thinking.forced else t for t in group.trajectories]
    forged = replace(group, trajectories=told)
    verdict = honest.judged(checker, forged, 1)
    assert (verdict.kind, verdict.certain) == (kind, True)
