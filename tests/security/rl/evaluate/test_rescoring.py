"""A sample of groups is computed again: lies are found, and honest workers are not accused."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from honest_groups import CONFIG, SECRET, HonestRun

from deltawire.envs import register
from deltawire.envs.base import Environment, Task, Turn
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.rl.evaluate.rescoring import GroupChecker, RecordedModel, Rescoring


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
    monkeypatch.setattr(checker, "_reward_again", lambda *_: 1.0)
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


def test_what_cannot_be_read_is_not_judged(honest, checker):
    group = changed(honest.group(0), versions_T=lambda t: t.versions_T + 40)
    assert honest.judged(checker, group).kind == ""
