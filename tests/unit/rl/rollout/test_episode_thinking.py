"""Episodes with thinking budgets: the embedded engine keeps them, inserted tokens are no part of
the loss, environments read the answer, and the model is told its budget."""

import asyncio

import msgspec
import numpy as np
import pytest
import torch

from deltawire.chat.text import Text
from deltawire.config import BuildConfig, ThinkingConfig
from deltawire.engines.base import Completion
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import Environment, Turn
from deltawire.envs.base import Task
from deltawire.errors import InputError
from deltawire.rl.rollout.episode import play_all, run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of, with_budget
from deltawire.train.batch import collate
from deltawire.train.build import build_model
from deltawire.train.policy import token_logprobs

STOP = 256


class Quiz(Environment):
    """Asks a question a turn and keeps what it reads."""

    def __init__(self, turns=1):
        self.turns = turns
        self.read = []

    async def reset(self):
        return Turn("ask")

    async def step(self, action):
        self.read.append((action.thinking, action.text))
        return Turn("next", reward=1.0, done=len(self.read) == self.turns)


class Scripted:
    """Draws the scripted parts, one a request."""

    version, slots, capacity = 3, 8, 1 << 20

    def __init__(self, *parts):
        self.parts = [list(part) for part in parts]
        self.prompts = []

    async def generate(self, prompt, sampling, *, on_token=None):
        self.prompts.append(list(prompt))
        tokens = self.parts.pop(0)[: sampling.max_tokens]
        for token in tokens:
            if on_token is not None:
                on_token(token)
        finish = "stop" if tokens[-1] == STOP else "length"
        return Completion(tokens, [-1.0] * len(tokens), [3] * len(tokens), finish)


def config_of(**keys):
    raw = {"start": "(", "end": ")", "budgets": [4], "answer_tokens": 5} | keys
    return msgspec.convert(raw, ThinkingConfig)


def play(engine, environment, text, config, *, turns=1, context=200):
    limits = EpisodeLimits(64, turns, context, thinking=config, budget=config.largest)
    return asyncio.run(run_episode(engine, environment, text, temperature=1.0, limits=limits))


@pytest.fixture
def text(byte_tokenizer):
    return Text(byte_tokenizer)


def test_the_answer_is_read_and_the_closing_is_inserted(text):
    engine, quiz = Scripted(b"(abcd", [*b"yes", STOP]), Quiz()
    t = play(engine, quiz, text, config_of(closing="so")).trajectory
    assert bytes(t.tokens_T[:-1].tolist()) == b"(abcdso)yes"
    assert t.mask_T.tolist() == [1] * 5 + [0] * 3 + [1] * 4
    assert t.logprobs_T[5:8].tolist() == [0, 0, 0]
    assert t.thinking.budget == 4
    assert t.thinking.turns == ((4, "forced"),)
    assert t.thinking.forced == ((5, 8),)
    assert quiz.read == [("(abcdso)", "yes")]
    assert engine.prompts[1] == list(b"ask(abcdso)")


def test_each_turn_has_its_budget(text):
    parts = ([*b"(ab)", *b"x"], [STOP], [*b"(abcd"], [*b"y", STOP])
    engine, quiz = Scripted(*parts), Quiz(turns=2)
    t = play(engine, quiz, text, config_of(), turns=2).trajectory
    assert [read for _, read in quiz.read] == ["x", "y"]
    assert t.thinking.turns == ((2, "answered"), (4, "forced"))
    ((start, end),) = t.thinking.forced
    assert bytes(t.tokens_T[start:end].tolist()) == b")"
    assert not t.mask_T[start:end].any()
    assert t.turns == 2


def test_thinking_that_never_closes_is_no_answer(text):
    engine, quiz = Scripted([*b"(ab", STOP]), Quiz()
    t = play(engine, quiz, text, config_of()).trajectory
    assert t.thinking.turns == ((3, "cut"),)
    assert quiz.read == [("(ab", "")]


def test_an_end_mark_in_the_answer_ends_it(text):
    """Otherwise a model could think on in its answer."""
    engine, quiz = Scripted([*b"(a)x"], [*b"y)zz"]), Quiz()
    t = play(engine, quiz, text, config_of()).trajectory
    assert t.thinking.turns == ((1, "stray_mark"),)
    assert bytes(t.tokens_T.tolist()) == b"(a)xy)"
    assert quiz.read[0][1] == "xy)"


@pytest.mark.parametrize("way", ["message", "tokens"])
def test_the_model_is_told_its_budget(text, way):
    engine, quiz = Scripted([*b"(a)x", STOP]), Quiz()
    config = config_of(tell=" [{budget}]", tell_as=way)
    episode = play(engine, quiz, text, config)
    assert bytes(episode.prompt) == b"ask [4]"


def test_a_model_without_marks_is_refused(text):
    with pytest.raises(InputError, match=r"no marks of thinking") as caught:
        play(Scripted([STOP]), Quiz(), text, config_of(start="", end=""))
    assert "rollout.thinking.start" in str(caught.value)


def test_a_full_context_cuts_the_thinking(text):
    engine, quiz = Scripted(b"(", b"a"), Quiz()
    t = play(engine, quiz, text, config_of(closing="a long closing sentence"), context=5).trajectory
    assert len(t.tokens_T) == 2
    assert t.thinking.turns[0][1] == "cut"


@pytest.fixture(scope="module")
def played(byte_tokenizer):
    """Episodes of a random model on the embedded engine, each with a budget of its own."""
    torch.manual_seed(3)
    model = build_model(BuildConfig(layers=2, hidden_size=32), seed=3).float().eval()
    text = Text(byte_tokenizer)
    config = config_of(budgets=[3, 5, 9], per="episode", closing="so")
    limits = EpisodeLimits(32, 2, 200, thinking=config)
    engine = TransformersEngine(model, stop_tokens=[STOP], slots=4, capacity=200, seed=1, version=2)
    plays = []
    for number in range(16):
        own = with_budget(limits, version=0, group="n/t", episode=number)
        plays.append(
            lambda own=own: run_episode(engine, Quiz(2), text, temperature=1.0, limits=own)
        )
    episodes = asyncio.run(play_all(engine, plays, concurrent=4))
    return model, episodes


def test_no_budget_is_exceeded_on_the_embedded_engine(played):
    _, episodes = played
    assert {e.trajectory.thinking.budget for e in episodes} == {3, 5, 9}
    for episode in episodes:
        t = episode.trajectory
        assert not episode.cause
        assert all(thought <= t.thinking.budget for thought, _ in t.thinking.turns)
        opened = (t.tokens_T == ord("(")) & (t.mask_T == 1)
        if not opened.any():
            assert not t.thinking.forced


def test_log_probabilities_are_those_of_the_model(played):
    """A forced close does not spoil the log-probability of any token that was drawn."""
    model, episodes = played
    group = group_of("w0", "n", Task("t", None), 1.0, episodes)
    batch = collate([group])
    with torch.no_grad():
        found_NC = token_logprobs(model, batch).numpy()
    for (_, place), row in zip(batch.members_N, found_NC, strict=True):
        t = group.trajectories[place]
        drawn = t.mask_T == 1
        np.testing.assert_allclose(row[: len(drawn)][drawn], t.logprobs_T[drawn], atol=2e-4)


def test_thinking_that_every_turn_begins_with_is_closed(byte_tokenizer):
    """Without a start mark a random model thinks at once, and is closed by force almost always."""
    torch.manual_seed(3)
    model = build_model(BuildConfig(layers=2, hidden_size=32), seed=3).float().eval()
    engine = TransformersEngine(model, stop_tokens=[STOP], slots=4, capacity=200, seed=1)
    limits = EpisodeLimits(32, 1, 200, thinking=config_of(start=""), budget=6)
    text = Text(byte_tokenizer)
    play_one = lambda: run_episode(engine, Quiz(), text, temperature=1.0, limits=limits)  # noqa: E731
    episodes = asyncio.run(play_all(engine, [play_one] * 12, concurrent=4))
    forced = [e.trajectory for e in episodes if e.trajectory.thinking.forced]
    assert len(forced) >= 6
    for t in forced:
        assert t.thinking.turns[0][0] == 6
        assert t.thinking.forced == ((6, 7),)
        assert t.mask_T.tolist()[:7] == [1] * 6 + [0]
