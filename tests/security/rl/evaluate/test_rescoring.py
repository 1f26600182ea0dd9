"""A sample of groups is computed again: lies are found, and honest workers are not accused."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from honest_groups import CONFIG, SECRET, HonestRun

from deltawire.envs import register
from deltawire.envs.base import Environment, Task, Turn
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.rl.evaluate import recorded_model
from deltawire.rl.evaluate.recorded_model import RecordedModel, memory_of
from deltawire.rl.evaluate.rescoring import GroupChecker, Rescoring


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    run = HonestRun(tmp_path_factory.mktemp("model"))
    run.step()
    return run


@pytest.fixture(scope="module")
def checker(honest):
    model = RecordedModel(honest.bucket, honest.run, honest.config, honest.folder)
    return GroupChecker(honest.config, honest.tasks, honest.text, model)


def changed(group, **changes):
    trajectories = [replace(t, **{k: f(t) for k, f in changes.items()}) for t in group.trajectories]
    return replace(group, trajectories=trajectories)


def test_an_honest_group_agrees(honest, checker):
    for number in range(3):
        verdict = honest.judged(checker, honest.group(number), number)
        assert (verdict.kind, verdict.detail) == ("", "")
    assert checker.unjudged == []


LIES = {
    "a reward": ("reward", {"reward": lambda t: 1.0 - t.reward}),
    "log-probabilities": ("log-probabilities", {"logprobs_T": lambda t: t.logprobs_T - 1}),
    "one log-probability": (
        "log-probabilities",
        {"logprobs_T": lambda t: np.r_[np.float32(-20), t.logprobs_T[1:]]},
    ),
    "a version that did not draw it": (
        "log-probabilities",
        {"versions_T": lambda t: np.zeros_like(t.versions_T)},
    ),
    "another prompt": ("prompt", {"prompt": lambda _: np.array([65, 66, 10], np.int32)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(honest, checker, lie):
    kind, changes = LIES[lie]
    verdict = honest.judged(checker, changed(honest.group(1), **changes), 1)
    assert (verdict.kind, verdict.certain) == (kind, True)
    assert verdict.detail


def extended(t, tokens, mask):
    """A trajectory that goes on with tokens, with honest figures for them."""
    count = len(tokens)
    return replace(
        t,
        tokens_T=np.r_[t.tokens_T, np.array(tokens, np.int32)],
        logprobs_T=np.r_[t.logprobs_T, np.full(count, t.logprobs_T[-1], np.float32)],
        versions_T=np.r_[t.versions_T, np.full(count, t.versions_T[-1], np.int32)],
        mask_T=np.r_[t.mask_T, np.array(mask, np.uint8)],
    )


def with_right_figures(checker, group):
    """The group with the log-probabilities that the trainer computes: only the text is a lie."""
    rows = iter(checker._model.logprobs(group, int(group.newest_version)))
    return changed(group, logprobs_T=lambda t: np.minimum(next(rows), 0))


POISON = {
    "after the episode's end": ([65, 66, 67], [0, 1, 1]),
    "as words of the environment": ([65, 66, 67], [0, 0, 0]),
}


@pytest.mark.parametrize("where", POISON)
def test_tokens_after_a_rewarded_answer_are_found(honest, checker, where):
    """The answer earns its reward, and what follows it would be trained on with that reward."""
    group = honest.group(1)
    longer = [extended(t, *POISON[where]) for t in group.trajectories]
    forged = with_right_figures(checker, replace(group, trajectories=longer))
    assert honest.judged(checker, forged, 1).kind == "prompt"


def test_tokens_after_the_end_of_an_answer_are_found(honest, checker):
    """Text that follows an end token in one completion is invisible to a scorer."""
    group = honest.group(1)
    forged = changed(group, tokens_T=lambda t: np.r_[np.int32(256), t.tokens_T[1:]])
    verdict = honest.judged(checker, with_right_figures(checker, forged), 1)
    assert (verdict.kind, verdict.certain) == ("prompt", True)


def test_turns_that_are_not_there_do_not_hide_a_reward(honest, checker, monkeypatch):
    """A template writes between turns, so turns are there or are a lie. Without one, the run's
    bound on turns holds, and what is left is named as not judged."""
    forged = changed(honest.group(1), reward=lambda t: 1.0 - t.reward, turns=lambda _: 2)
    monkeypatch.setattr(type(honest.text), "has_template", True)
    assert honest.judged(checker, forged, 1).kind == "turns"
    monkeypatch.setattr(type(honest.text), "has_template", False)
    monkeypatch.setattr(checker, "unjudged", [])
    assert honest.judged(checker, forged, 1).kind == ""
    assert checker.unjudged == ["rewards: of episodes whose turns run together"]
    bounds = Bounds.of(honest.config, 300)
    assert bounds.fault(forged) == "an episode of more than 1 turns"
    assert bounds.fault(honest.group(1)) == ""


def test_another_family_is_found(honest, checker):
    verdict = honest.judged(checker, replace(honest.group(1), family="easy"), 1)
    assert (verdict.kind, verdict.certain) == ("task", True)


def test_a_late_workers_group_is_compared_with_the_version_that_drew_it(honest, checker):
    group, drew = honest.group(2), honest.version
    honest.step()
    assert int(group.newest_version) == drew < honest.version
    assert honest.judged(checker, group, 2).kind == ""
    newer = changed(group, versions_T=lambda t: np.full_like(t.versions_T, honest.version))
    assert honest.judged(checker, newer, 2).kind == "log-probabilities"


def test_failing_only_when_played_again_is_a_doubt_if_others_do_not(honest, checker, monkeypatch):
    """A worker cannot hide a reward in an episode that breaks the trainer's environment; a machine
    whose environment is broken accuses nobody."""
    monkeypatch.setattr(checker, "_played", Counter())
    monkeypatch.setattr(checker, "_failed", Counter())
    for number in range(3):
        assert honest.judged(checker, honest.group(number, worker="w1"), number).kind == ""
    again = checker._reward_again

    def failing(group, task, segments):
        if group.worker == "w1":
            return again(group, task, segments)
        return float("nan"), "step took longer than 120 s"

    monkeypatch.setattr(checker, "_reward_again", failing)
    verdict = honest.judged(checker, honest.group(0), 0)
    assert (verdict.kind, verdict.certain) == ("failure", False)
    checker._failed["w2"] += 1
    assert honest.judged(checker, honest.group(0), 0).kind == ""


def test_a_task_that_the_worker_chose_is_found(honest, checker):
    """It stored the group of number 5 as number 1: the easy tasks only, or one task many times."""
    verdict = honest.judged(checker, honest.group(5), 1)
    assert verdict.kind == "task"


def test_tokens_that_two_versions_drew_are_near_one_of_them(honest, checker):
    """After a swap the cache holds keys of the older version; the sampler's figures mix both."""
    group = honest.group(2)
    old = changed(group, versions_T=lambda t: np.r_[t.versions_T[:1] - 1, t.versions_T[1:]])
    first = [row[0] for row in checker._model.logprobs(group, honest.version - 1)]
    rows = iter(first)
    mixed = changed(old, logprobs_T=lambda t: np.r_[next(rows), t.logprobs_T[1:]])
    assert honest.judged(checker, mixed, 2).kind == ""
    forged = changed(mixed, logprobs_T=lambda t: np.r_[t.logprobs_T[:1], t.logprobs_T[1:] - 2])
    assert honest.judged(checker, forged, 2).kind == "log-probabilities"


def test_another_engines_arithmetic_is_tolerated(honest, checker):
    """Normal noise of 0.05 nats a token: more than bfloat16 against float32 makes of them."""
    noise = np.random.default_rng(0)
    group = changed(
        honest.group(3),
        logprobs_T=lambda t: np.minimum(t.logprobs_T + noise.normal(0, 0.05, len(t.logprobs_T)), 0),
    )
    assert honest.judged(checker, group, 3).kind == ""


class _Moody(Environment):
    """Its reward depends on how often it was asked."""

    asked = 0

    async def reset(self):
        return Turn("Well?")

    async def step(self, action):
        del action
        _Moody.asked += 1
        return Turn(reward=float(_Moody.asked % 7), done=True)


class MoodyTasks:
    def __init__(self, config, *, seed):
        del config, seed

    def draw(self, stream, index):
        return Task(f"{stream[:8]}/{index}", None)

    def heldout(self):
        return []

    def open(self, task):
        del task
        return _Moody()


@pytest.mark.parametrize("declared", [False, True])
def test_a_reward_that_is_not_deterministic_accuses_nobody(tmp_path, declared):
    """Also if the environment wrongly declares that it is: it is played again before it counts."""
    register("moody", MoodyTasks)
    raw = copy.deepcopy(CONFIG)
    raw["task"] = {"environment": "moody"}
    run = HonestRun(tmp_path, raw)
    run.tasks.deterministic = declared
    checker = GroupChecker(
        run.config, run.tasks, run.text, RecordedModel(run.bucket, run.run, run.config, tmp_path)
    )
    for number in range(4):
        group = changed(run.group(number), reward=lambda t: t.reward + 100)
        assert run.judged(checker, group, number).kind == ""
    assert len(checker.unjudged) == 1
    assert checker.unjudged[0].startswith("rewards: the environment")


def test_a_reward_of_zero_may_be_a_scorer_that_ran_out_of_time(honest, checker, monkeypatch):
    """One such disagreement is a doubt; only several quarantine."""
    group = changed(honest.group(4), reward=lambda _: 0.0)
    monkeypatch.setattr(honest.tasks, "may_time_out", True)
    monkeypatch.setattr(checker, "_reward_again", lambda *_: (1.0, ""))
    verdict = honest.judged(checker, group, 4)
    assert (verdict.kind, verdict.certain) == ("reward", False)


def test_the_thread_judges_and_never_blocks(honest):
    trust = msgspec.structs.replace(honest.config.trust, rescore_waiting=2)
    config = msgspec.structs.replace(honest.config, trust=trust)
    rescoring = Rescoring(honest.bucket, honest.run, config)
    forged = changed(honest.group(0), reward=lambda t: 1.0 - t.reward)
    try:
        accepted = [rescoring.submit(BufferedGroup(0, forged), 0, 0, SECRET) for _ in range(40)]
        assert not all(accepted)
        found = []
        for _ in range(1200):
            found += rescoring.verdicts()
            if found:
                break
            rescoring._closed.wait(0.1)
        assert found[0].kind == "reward", rescoring.error
    finally:
        rescoring.close()
    assert not rescoring._thread.is_alive()


def test_a_model_that_does_not_fit_is_not_opened(honest, monkeypatch):
    """Rewards are still judged, and what is not is named in the status."""
    monkeypatch.setattr(recorded_model, "available_bytes", lambda _: 1000)
    model = RecordedModel(honest.bucket, honest.run, honest.config, honest.folder)
    assert {one.device.type for one in model._model.parameters()} == {"meta"}
    checker = GroupChecker(honest.config, honest.tasks, honest.text, model)
    assert len(checker.unjudged) == 1
    assert checker.unjudged[0].startswith("log-probabilities: another copy of the weights needs")
    forged = changed(honest.group(1), logprobs_T=lambda t: t.logprobs_T - 1)
    assert honest.judged(checker, forged, 1).kind == ""
    forged = changed(honest.group(1), reward=lambda t: 1.0 - t.reward)
    assert honest.judged(checker, forged, 1).kind == "reward"


def test_the_copy_takes_the_memory_that_is_stated(honest):
    """4 bytes a parameter for the model, and 2 for the published bf16 weights."""
    count = sum(one.numel() for one in honest.model.parameters())
    assert memory_of(honest.model, honest.run) == 6 * count


def test_what_cannot_be_read_is_not_judged(honest, checker):
    group = changed(honest.group(0), versions_T=lambda t: t.versions_T + 40)
    assert honest.judged(checker, group).kind == ""
