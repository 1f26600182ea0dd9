"""Groups whose episodes share a beginning are played again: honest ones agree, and reused tokens
that nobody drew, or that another episode drew, are found or not even decoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from honest_groups import CONFIG, HonestRun

from deltawire.errors import CorruptError
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.rl.evaluate.recorded_model import RecordedModel
from deltawire.rl.evaluate.rescoring import GroupChecker
from deltawire.wire.rollouts import Reuse, decode_group, encode_group

THINKING = {
    "end": ")", "budgets": [2, 4, 8], "per": "prefix", "answers": 2, "answer_tokens": 6,
    "closing": "so",
}  # fmt: skip
KINDS = {
    "prefix": {"max_tokens": 16, "group_size": 12, "thinking": THINKING},
    "turns": {
        "max_tokens": 6, "group_size": 6, "scaffold": "plan_then_solve", "context": 400,
        "reuse": {"episodes": 3},
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def honest(request, tmp_path_factory):
    build = {**CONFIG["model"]["build"], "context": 512}
    raw = {**CONFIG, "rollout": {**CONFIG["rollout"], **KINDS[request.param]}}
    run = HonestRun(
        tmp_path_factory.mktemp("model"), {**raw, "model": {"build": build}}, capacity=400
    )
    run.kind = request.param
    run.step()
    return run


@pytest.fixture(scope="module")
def checker(honest):
    model = RecordedModel(honest.bucket, honest.run, honest.config, honest.folder)
    return GroupChecker(honest.config, honest.tasks, honest.text, model)


def sharers(group):
    """The trajectories that reuse tokens of another, by their place."""
    return {
        place: t
        for place, t in enumerate(group.trajectories)
        if t.reuse is not None and t.reuse.source != place
    }


def test_an_honest_group_agrees(honest, checker):
    shared = 0
    for number in range(3):
        group = honest.group(number)
        again = decode_group(encode_group(group), run="", key="")
        assert [t.reuse for t in again.trajectories] == [t.reuse for t in group.trajectories]
        shared += len(sharers(again))
        assert Bounds.of(honest.config, 300).fault(again) == ""
        verdict = honest.judged(checker, again, number)
        assert (verdict.kind, verdict.detail) == ("", "")
    assert shared >= 3 * 3
    assert checker.unjudged == []


def changed(group, change):
    """The group with the first sharer changed."""
    place = min(sharers(group))
    every = list(group.trajectories)
    every[place] = change(every[place], place)
    return replace(group, trajectories=every)


def _own_tokens(t, _):
    return replace(t, tokens_T=np.r_[(t.tokens_T[:1] + 1) % 128, t.tokens_T[1:]])


def _own_logprobs(t, _):
    return replace(t, logprobs_T=np.r_[t.logprobs_T[:1] - 1, t.logprobs_T[1:]])


def _trained(t, _):
    return replace(t, mask_T=np.r_[np.ones_like(t.mask_T[:1]), t.mask_T[1:]])


UNREADABLE = {
    "other tokens": (_own_tokens, "not those of their source"),
    "other log-probabilities": (_own_logprobs, "not those of their source"),
    "mask 1": (_trained, "with mask 1"),
    "all of it": (lambda t, _: replace(t, reuse=Reuse(0, len(t.tokens_T))), "none after them"),
    "of a later one": (
        lambda t, place: replace(t, reuse=Reuse(place + 3, t.reuse.count)), "later trajectory",
    ),
    "after another prompt": (
        lambda t, _: replace(t, prompt=np.array([65], np.int32)), "after another prompt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_false_reuse_is_not_decoded(honest, what):
    change, words = UNREADABLE[what]
    forged = changed(honest.group(1), change)
    with pytest.raises(CorruptError, match=words):
        decode_group(encode_group(forged), run="", key="")


def test_tokens_of_a_failed_episode_are_not_decoded(honest):
    group = honest.group(1)
    source = group.trajectories[min(sharers(group))].reuse.source
    every = list(group.trajectories)
    every[source] = replace(every[source], cause="it failed", reward=0.0)
    with pytest.raises(CorruptError, match="from an episode that failed"):
        decode_group(encode_group(replace(group, trajectories=every)), run="", key="")


def test_reuse_that_the_run_does_not_have_is_not_read(honest):
    group = honest.group(1)
    plain = replace(Bounds.of(honest.config, 300), sharing=1)
    assert "does not share its beginning" in plain.fault(group)
    other = replace(Bounds.of(honest.config, 300), sharing=2)
    assert "does not share its beginning" in other.fault(group)


def test_a_false_end_of_the_thought_is_found(honest, checker):
    if honest.kind != "prefix":
        return
    group = honest.group(2)
    every = list(group.trajectories)
    place = next(n for n, t in enumerate(every) if t.reuse is not None and t.reuse.source == n)
    count = every[place].reuse.count
    every[place] = replace(every[place], reuse=Reuse(place, count + 1))
    assert honest.judged(checker, replace(group, trajectories=every), 2).kind == "prompt"
