"""One episode: environment and engine in turn, token-in and token-out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deltawire.engines.transformers import Completion, Sampling, TransformersEngine
from deltawire.rl.envs import Environment
from deltawire.rl.text import Text
from deltawire.wire.rollouts import Trajectory


@dataclass(frozen=True)
class Limits:
    """Bounds of one episode: tokens a turn, turns, and tokens in all (prompt included)."""

    max_tokens: int
    max_turns: int
    context: int


@dataclass(frozen=True)
class Episode:
    """A finished episode."""

    prompt: list[int]
    trajectory: Trajectory
    solved: bool


async def generate(
    engine: TransformersEngine, prompt: Sequence[int], sampling: Sampling
) -> Completion:
    """Wait for one completion; somebody else calls the engine's `step`."""
    done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def finish(completion: Completion) -> None:
        if not done.done():
            done.set_result(completion)

    engine.submit(prompt, sampling, finish)
    return await done


async def run_episode(
    engine: TransformersEngine,
    environment: Environment,
    text: Text,
    *,
    temperature: float,
    limits: Limits,
) -> Episode:
    """Play one episode to its end or its limits.

    The next request's prompt is the very tokens of the last one plus what was drawn and what the
    environment answered: nothing is decoded and encoded again.
    """
    turn = await environment.reset()
    prompt = text.prompt(turn.text)
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    mask: list[int] = []
    reward, finish = turn.reward, "length"
    for number in range(1, limits.max_turns + 1):
        room = limits.context - len(prompt) - len(tokens)
        sampling = Sampling(min(limits.max_tokens, max(room, 1)), temperature)
        completion = await generate(engine, prompt + tokens, sampling)
        tokens += completion.tokens
        logprobs += completion.logprobs
        versions += completion.versions
        mask += [1] * len(completion.tokens)
        finish = completion.finish
        turn = await environment.step(text.decode(completion.tokens))
        reward += turn.reward
        answer = text.plain(turn.text)
        full = len(prompt) + len(tokens) + len(answer) >= limits.context
        if turn.done or full or number == limits.max_turns:
            break
        tokens += answer
        logprobs += [0.0] * len(answer)
        versions += [completion.versions[-1]] * len(answer)
        mask += [0] * len(answer)
    trajectory = Trajectory(
        np.array(tokens, np.int32),
        np.minimum(np.array(logprobs, np.float32), 0),
        np.array(versions, np.int32),
        np.array(mask, np.uint8),
        reward,
        finish,
    )
    return Episode(prompt, trajectory, environment.solved(reward))
