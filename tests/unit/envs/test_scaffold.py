"""Scaffolds lead the model through more turns; the environment sees the last answer only."""

import asyncio
import sys
from types import ModuleType

import numpy as np
import pytest

from deltawire.chat.text import Text
from deltawire.config import parse_config
from deltawire.config.scaffold import turn_limit
from deltawire.engines.base import Completion
from deltawire.envs import Environment, Turn
from deltawire.envs.base import AgentHarness
from deltawire.envs.scaffold import CHECK, PLAN, SOLVE, require_scaffold, scaffolded
from deltawire.errors import InputError
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits

STOP = 256
RAW = {"name": "run", "model": {"build": {}}}


class Sum(Environment):
    """Asks for 2+2 and keeps what it reads."""

    def __init__(self):
        self.read, self.closed = [], 0

    async def reset(self):
        return Turn("2+2?")

    async def step(self, action):
        self.read.append(action.text)
        return Turn(reward=float(action.text == "4"), done=True)

    async def probes(self):
        return {"length": float(len(self.read[-1]))}

    async def close(self):
        self.closed += 1


class Says:
    """Says one text a request."""

    version, slots, capacity = 3, 8, 1 << 20

    def __init__(self, *texts):
        self.texts, self.prompts = list(texts), []

    async def generate(self, prompt, sampling, *, on_token=None):
        self.prompts.append(bytes(token for token in prompt if token < 256).decode())
        tokens = [*self.texts.pop(0).encode(), STOP]
        return Completion(tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop")


def rollout(**keys):
    raw = {**RAW, "rollout": {"max_tokens": 16, "context": 4096, **keys}}
    return parse_config(raw, source="s").rollout


def play(byte_tokenizer, environment, *texts, **keys):
    engine = Says(*texts)
    limits = EpisodeLimits.of(rollout(**keys))
    found = asyncio.run(
        run_episode(engine, environment, Text(byte_tokenizer), temperature=1.0, limits=limits)
    )
    return found, engine


def test_a_plan_comes_before_the_answer(byte_tokenizer):
    environment = Sum()
    found, engine = play(byte_tokenizer, environment, "add them", "4", scaffold="plan_then_solve")
    assert environment.read == ["4"]
    assert environment.closed == 1
    assert engine.prompts[0] == f"2+2?{PLAN}"
    assert engine.prompts[1] == f"2+2?{PLAN}add them{SOLVE}"
    assert (found.solved, found.trajectory.reward, found.trajectory.turns) == (True, 1.0, 2)
    assert found.trajectory.probes == {"length": 1.0}
    drawn = found.trajectory.tokens_T[found.trajectory.mask_T == 1]
    assert drawn.tolist() == [*b"add them", STOP, *b"4", STOP]


def test_only_the_checked_answer_is_scored(byte_tokenizer):
    environment = Sum()
    found, engine = play(byte_tokenizer, environment, "5", "4", scaffold="check_and_retry")
    assert environment.read == ["4"]
    assert engine.prompts[1] == f"2+2?5{CHECK}"
    assert found.solved
    spoiled, _ = play(byte_tokenizer, Sum(), "4", "5", scaffold="check_and_retry")
    assert not spoiled.solved


def test_without_a_scaffold_nothing_changes(byte_tokenizer):
    environment = Sum()
    found, engine = play(byte_tokenizer, environment, "4")
    assert scaffolded(environment, "plain") is environment
    assert (len(engine.prompts), found.solved) == (1, True)


@pytest.fixture
def own_module(monkeypatch):
    module = ModuleType("own_scaffolds")
    module.twice = lambda environment: scaffolded(environment, "check_and_retry")
    module.broken = lambda environment: 1 / 0
    module.other = lambda environment: "text"
    module.number = 3
    monkeypatch.setitem(sys.modules, "own_scaffolds", module)
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "own_scaffolds,not_there")
    return module


def test_an_own_scaffold_is_called(byte_tokenizer, own_module):
    found, _ = play(byte_tokenizer, Sum(), "5", "4", scaffold="own_scaffolds:twice")
    assert found.solved


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_scaffolds:broken", "raised ZeroDivisionError"),
        ("own_scaffolds:other", "returned str"),
        ("own_scaffolds:missing", "cannot load"),
        ("own_scaffolds:number", "not a function"),
        ("not_there:f", "cannot load"),
    ],
)
def test_a_wrong_scaffold_is_refused(own_module, name, words):
    with pytest.raises(InputError, match=words):
        scaffolded(Sum(), name)


def test_a_module_that_is_not_trusted_is_not_imported(monkeypatch):
    monkeypatch.delenv("DELTAWIRE_TRUSTED_MODULES", raising=False)
    for call in (lambda: require_scaffold("antigravity:f"), lambda: scaffolded(Sum(), "this:f")):
        with pytest.raises(InputError, match="does not trust"):
            call()
    assert "antigravity" not in sys.modules


def test_a_harness_is_refused():
    class Drives(AgentHarness):
        async def drive(self, endpoint):
            return 0.0

    with pytest.raises(InputError, match="harness"):
        scaffolded(Drives(), "plan_then_solve")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"scaffold": "plan"}, "rollout.scaffold"),
        ({"scaffold": "module"}, "rollout.scaffold"),
        ({"scaffold": "plan_then_solve", "max_steps": 1}, "takes two turns"),
    ],
)
def test_wrong_settings_are_refused(keys, words):
    with pytest.raises(InputError, match=words):
        rollout(**keys)


def test_turns_are_bounded_alike_for_workers_and_the_trainer():
    for keys, turns in (
        ({"max_turns": 3}, 3),
        ({"max_turns": 3, "scaffold": "check_and_retry"}, 4),
        ({"max_turns": 3, "scaffold": "check_and_retry", "max_steps": 2}, 2),
        ({"max_turns": 3, "scaffold": "a:b"}, 50),
        ({"max_turns": 3, "scaffold": "a:b", "max_steps": 7}, 7),
    ):
        raw = {**RAW, "rollout": {"max_tokens": 16, "context": 4096, **keys}}
        config = parse_config(raw, source="s")
        assert turn_limit(config.rollout) == EpisodeLimits.of(config.rollout).max_turns == turns
        bounds = Bounds.of(config, vocabulary=300)
        assert np.isin([turns * 16, turns], list(vars(bounds).values())).all()
