"""An environment made with verifiers, unchanged, as tasks of a run."""

import asyncio
import sys

import pytest

from deltawire.chat.text import Text
from deltawire.config import TaskConfig
from deltawire.engines.base import Completion
from deltawire.envs import open_tasks
from deltawire.envs.verifiers_tasks import _environment
from deltawire.errors import InputError
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits

pytest.importorskip("verifiers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ENV = {"taskset": {"id": "doubling"}, "agent": {"harness": {"id": "doubling"}}}


class Doubler:
    """Says a fixed number, whatever it is asked."""

    version, slots, capacity, active = 3, 4, 2048, 0

    def __init__(self, said):
        self.said = said

    async def generate(self, prompt, sampling, *, on_token=None):
        tokens = [*self.said.encode(), 256]
        return Completion(tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop")


def source(heldout=2):
    options = {"env": ENV, "tasks": 5}
    config = TaskConfig(environment="verifiers", heldout=heldout, options=options)
    return open_tasks(config, seed=0)


def test_untrusted_packages_are_not_imported(monkeypatch):
    monkeypatch.delenv("DELTAWIRE_TRUSTED_MODULES", raising=False)
    with pytest.raises(InputError, match="module doubling, which this machine does not trust"):
        source()


def test_an_environment_of_verifiers_gives_tasks_and_rewards(monkeypatch, byte_tokenizer):
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "doubling")
    tasks = source()
    assert [task.data for task in tasks.heldout()] == [0, 1]
    drawn = {tasks.draw("w", index).data for index in range(50)}
    assert drawn == {2, 3, 4}
    limits = EpisodeLimits(16, 8, 2048, step_s=60, episode_s=60)
    for number, said, reward in [(1, "2", 1.0), (1, "7", 0.0), (0, "0", 1.0)]:
        episode = asyncio.run(
            run_episode(
                Doubler(said),
                tasks.open(tasks.heldout()[number]),
                Text(byte_tokenizer),
                temperature=1.0,
                limits=limits,
            )
        )
        assert episode.cause == ""
        assert episode.trajectory.reward == reward
        assert bytes(episode.prompt) == f"double {number}".encode()
        assert episode.trajectory.turns == 2


@pytest.mark.parametrize("where", ["its own code", "a task that it started"])
def test_a_harness_that_exits_fails_its_episode(monkeypatch, byte_tokenizer, where):
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "doubling")
    tasks = source()

    async def leave():
        sys.exit(3)

    async def launch(*_, **__):
        await (leave() if where == "its own code" else asyncio.create_task(leave()))

    monkeypatch.setattr(sys.modules["doubling"].DoublingHarness, "launch", launch)
    episode = asyncio.run(
        run_episode(
            Doubler("2"),
            tasks.open(tasks.heldout()[1]),
            Text(byte_tokenizer),
            temperature=1.0,
            limits=EpisodeLimits(16, 8, 2048, step_s=60, episode_s=60),
        )
    )
    assert "SystemExit" in episode.cause
    assert episode.trajectory.reward == 0.0


def test_agents_run_on_this_machine_unless_they_are_placed(monkeypatch):
    """verifiers' defaults need an account at a hosted service."""
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "doubling")
    config = _environment(ENV).config
    assert (config.agent.runtime.type, config.interception.type) == ("subprocess", "server")
    agent = {**ENV["agent"], "runtime": {"type": "docker", "image": "python:3.12"}}
    config = _environment({**ENV, "agent": agent, "interception": {"type": "elastic"}}).config
    assert (config.agent.runtime.type, config.interception.type) == ("docker", "elastic")


def test_tasksets_and_selections_are_named_as_for_vf_eval(monkeypatch):
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "doubling")

    def numbers(**options):
        config = TaskConfig(environment="verifiers", heldout=1, options=options)
        tasks = open_tasks(config, seed=0)
        return [task.data.prompt for task in tasks._tasks]

    def double(*values):
        return [f"double {value}" for value in values]

    rest = {name: value for name, value in ENV.items() if name != "taskset"}
    assert numbers(taskset="doubling", env=rest) == double(*range(6))
    assert numbers(env=ENV, select={"include": {"idx": "2:5"}}) == double(2, 3, 4)
    assert numbers(env=ENV, select={"skip": 1, "limit": 3}, tasks=2) == double(1, 2)
    shuffled = numbers(env=ENV, select={"shuffle": True, "seed": 1})
    assert shuffled != double(*range(6))
    assert sorted(shuffled) == double(*range(6))
    with pytest.raises(InputError, match=r"select.*limit"):
        numbers(env=ENV, select={"limit": 0})
    with pytest.raises(InputError, match="differ"):
        numbers(env=ENV, taskset="tripling")
    with pytest.raises(InputError, match="taskset, env, select and tasks"):
        numbers(env=ENV, rows=3)
    with pytest.raises(InputError, match="names no verifiers environment"):
        numbers(tasks=3)


def test_too_few_tasks_say_so(monkeypatch):
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "doubling")
    with pytest.raises(InputError, match="has 5 tasks, and 5 are held out"):
        source(heldout=5)
