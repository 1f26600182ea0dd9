"""Episodes: tokens go in as they came out, the environment's text is masked, limits hold."""

import asyncio

import numpy as np
import pytest

from deltawire.chat.text import Text
from deltawire.engines.base import Completion
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import Environment, Turn
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits
from deltawire.wire.rollouts import Group, decode_group, encode_group


class Conversation(Environment):
    """Answers each action from a list, and is done with its end."""

    def __init__(self, *answers, reward=0.25, prompt="ask"):
        self.answers = list(answers)
        self.reward = reward
        self.prompt = prompt
        self.heard = []

    async def reset(self):
        return Turn(self.prompt, reward=0.5)

    async def step(self, action):
        self.heard.append(action.text)
        await asyncio.sleep(0)
        text = self.answers[len(self.heard) - 1] if len(self.heard) <= len(self.answers) else ""
        return Turn(text, reward=self.reward, done=len(self.heard) > len(self.answers))

    def solved(self, total_reward):
        return total_reward >= 1.0


class ScriptedEngine:
    """Draws the scripted tokens, one completion a request, and remembers the prompts."""

    def __init__(self, *script, version=3):
        self.script = [list(tokens) for tokens in script]
        self.version = version
        self.prompts = []
        self.asked = []

    async def generate(self, prompt, sampling, *, on_token=None):
        self.prompts.append(list(prompt))
        self.asked.append(sampling)
        tokens = self.script[len(self.prompts) - 1][: sampling.max_tokens]
        logprobs = [-0.5 - index for index in range(len(tokens))]
        finish = "stop" if tokens[-1] == 256 else "length"
        version = self.version + len(self.prompts)
        return Completion(tokens, logprobs, [version] * len(tokens), finish)


@pytest.fixture
def text(byte_tokenizer):
    return Text(byte_tokenizer)


def play(engine, environment, text, *, tokens=8, turns=5, context=64, temperature=1.0):
    limits = EpisodeLimits(tokens, turns, context)
    return asyncio.run(
        run_episode(engine, environment, text, temperature=temperature, limits=limits)
    )


def test_tokens_in_are_tokens_out(text):
    """Tokens that no text would be encoded to (half a character, a special one in the middle) are
    part of the next prompt as they are."""
    script = ([0xC3, 65, 256], [66, 0xA9], [256])
    engine = ScriptedEngine(*script)
    environment = Conversation("é?", "ok")
    episode = play(engine, environment, text)
    t = episode.trajectory
    first, second = list("é?".encode()), list(b"ok")
    assert episode.prompt == list(b"ask")
    assert engine.prompts == [
        [*b"ask"],
        [*b"ask", *script[0], *first],
        [*b"ask", *script[0], *first, *script[1], *second],
    ]
    assert t.tokens_T.tolist() == [*script[0], *first, *script[1], *second, *script[2]]
    assert t.mask_T.tolist() == [1] * 3 + [0] * 3 + [1] * 2 + [0] * 2 + [1]
    drawn = t.mask_T == 1
    assert t.logprobs_T[drawn].tolist() == [-0.5, -1.5, -2.5, -0.5, -1.5, -0.5]
    assert t.versions_T[drawn].tolist() == [4, 4, 4, 5, 5, 6]
    assert environment.heard == ["\ufffdA", "B\ufffd", ""]
    assert t.reward == 0.5 + 3 * 0.25
    assert episode.solved
    assert t.finish == "stop"


def test_one_turn_is_the_plain_case(text):
    engine = ScriptedEngine([65, 66, 256])
    episode = play(engine, Conversation(), text)
    assert episode.trajectory.tokens_T.tolist() == [65, 66, 256]
    assert episode.trajectory.mask_T.all()
    assert not episode.solved
    assert engine.asked[0].max_tokens == 8


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_turns_are_bounded_and_end_with_the_model(text, turns):
    engine = ScriptedEngine(*[[65, 66]] * 5)
    environment = Conversation(*["more"] * 9)
    t = play(engine, environment, text, turns=turns).trajectory
    assert len(environment.heard) == turns
    assert t.mask_T.tolist() == ([1, 1] + [0] * 4) * (turns - 1) + [1, 1]


@pytest.mark.parametrize("context", range(4, 40))
def test_the_context_bounds_everything(text, context):
    """Prompt, drawn tokens and the environment's text together, whatever is written."""
    engine = ScriptedEngine(*[[65] * 8] * 9)
    environment = Conversation(*["x" * 7] * 9)
    episode = play(engine, environment, text, tokens=5, turns=9, context=context)
    t = episode.trajectory
    assert len(episode.prompt) + len(t.tokens_T) <= context
    assert t.mask_T[-1] == 1
    for prompt, sampling in zip(engine.prompts, engine.asked, strict=True):
        assert 1 <= sampling.max_tokens <= 5
        assert len(prompt) + sampling.max_tokens <= context
    for length in (t.logprobs_T, t.versions_T, t.mask_T):
        assert len(length) == len(t.tokens_T)


def test_an_answer_that_does_not_fit_ends_the_episode(text):
    engine = ScriptedEngine([65] * 4, [66] * 4)
    environment = Conversation("y" * 500)
    t = play(engine, environment, text).trajectory
    assert t.tokens_T.tolist() == [65] * 4
    assert environment.heard == ["AAAA"]


def test_what_comes_out_can_be_stored(text):
    engine = ScriptedEngine([0xC3, 65, 256], [66])
    episode = play(engine, Conversation("z"), text)
    prompt = np.array(episode.prompt, np.int32)
    group = Group("w", "n", "t", 1.0, prompt, [episode.trajectory])
    again = decode_group(encode_group(group), run="", key="").trajectories[0]
    for field in ("tokens_T", "logprobs_T", "versions_T", "mask_T"):
        assert np.array_equal(getattr(again, field), getattr(episode.trajectory, field))
    assert group.tokens == 4


def test_rounding_above_zero_is_no_probability_above_one(text):
    class Rounding(ScriptedEngine):
        async def generate(self, prompt, sampling, *, on_token=None):
            return Completion([65, 256], [1e-7, -0.0], [0, 0], "stop")

    assert (play(Rounding(), Conversation(), text).trajectory.logprobs_T <= 0).all()


async def stepped(engine, *episodes):
    """Call the engine's `step` until the episodes are over."""
    together = asyncio.gather(*episodes)
    while not together.done():
        engine.step()
        await asyncio.sleep(0)
    return together.result()


def test_many_episodes_share_an_engine(tiny, text):
    """Greedy episodes over several turns give the same tokens in one batch as one at a time."""
    limits = EpisodeLimits(6, 3, 90)

    def episode(engine, number):
        environment = Conversation(f"and {number}?", "go on", prompt=f"question {number} ")
        return run_episode(engine, environment, text, temperature=0.0, limits=limits)

    def engine():
        return TransformersEngine(tiny, stop_tokens=[256], slots=3, capacity=90)

    shared = engine()
    together = asyncio.run(stepped(shared, *(episode(shared, n) for n in range(5))))
    for number, found in enumerate(together):
        single = engine()
        (separate,) = asyncio.run(stepped(single, episode(single, number)))
        assert found.prompt == separate.prompt
        assert found.trajectory.tokens_T.tolist() == separate.trajectory.tokens_T.tolist()
        assert found.trajectory.logprobs_T == pytest.approx(
            separate.trajectory.logprobs_T, abs=1e-4
        )


def test_a_cancelled_episode_does_not_change_the_others(tiny, text):
    async def run():
        engine = TransformersEngine(tiny, stop_tokens=[], slots=2, capacity=64)
        limits = EpisodeLimits(10, 1, 64)
        tasks = [
            asyncio.ensure_future(
                run_episode(engine, Conversation(), text, temperature=1.0, limits=limits)
            )
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        engine.step()
        tasks[0].cancel()
        while not all(task.done() for task in tasks):
            engine.step()
            await asyncio.sleep(0)
        assert engine.active == 0
        return tasks

    first, *others = asyncio.run(run())
    assert first.cancelled()
    assert [len(task.result().trajectory.tokens_T) for task in others] == [10, 10]


def test_cancelling_everything_ends_waiting_episodes(tiny, text):
    async def run():
        engine = TransformersEngine(tiny, stop_tokens=[], slots=1, capacity=64)
        limits = EpisodeLimits(10, 1, 64)
        environments = [Conversation() for _ in range(3)]
        tasks = [
            asyncio.ensure_future(
                run_episode(engine, environment, text, temperature=1.0, limits=limits)
            )
            for environment in environments
        ]
        await asyncio.sleep(0)
        engine.step()
        for task in tasks:
            task.cancel()
        engine.cancel_all()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.active == 0
        assert not any(environment.heard for environment in environments)
        return done

    assert all(isinstance(end, asyncio.CancelledError) for end in asyncio.run(run()))


def test_a_prompt_that_does_not_fit_is_reported(tiny, text):
    engine = TransformersEngine(tiny, stop_tokens=[], slots=1, capacity=16)
    episode = play(engine, Conversation(prompt="p" * 16), text, context=16)
    assert "engine refused the prompt" in episode.cause
    assert "does not fit the engine's 16" in episode.cause


def test_generate_waits_for_one_completion(tiny):
    from deltawire.engines.base import Sampling

    async def run():
        engine = TransformersEngine(tiny, stop_tokens=[], slots=1, capacity=16)
        return await stepped(engine, engine.generate([1, 2], Sampling(4, 0.0)))

    (completion,) = asyncio.run(run())
    assert len(completion.tokens) == 4
