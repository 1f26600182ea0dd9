"""Runs an episode: environment and engine in turn, token-in and token-out.

The prompt of a request consists of the tokens of the last prompt, those that were drawn, and those
of the environment's answer: nothing is decoded and encoded again. When the context is full, the
episode may continue in another segment, after a prompt that again consists of earlier tokens::

    end       P t₁ b₁ t₂ b₂ t₃ ┊                 the episode is over
    drop      P t₁ b₁ t₂ b₂ t₃ ┊ P t₃ b₃ t₄ …    the oldest turns are left out
    summary   P t₁ b₁ t₂ ? s   ┊ P s b₂ t₃ …     the model writes s, which stands for the turns

P is the prompt, t a turn of the model, b the environment's answer, ? the request for a summary.
The tokens between ┊ and the next t are the prompt of the new segment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltawire.chat.messages import Tool
from deltawire.chat.requests import RequestBuilder
from deltawire.chat.text import Text
from deltawire.chat.thinking import BoundedCompletion, ThinkingLimits, generate_within
from deltawire.engines.base import Completion, Sampler
from deltawire.envs.base import (
    Action,
    AgentHarness,
    Environment,
    Message,
    Task,
    TaskSource,
    Turn,
)
from deltawire.envs.scaffold import scaffolded
from deltawire.errors import InputError
from deltawire.parity.routes import pack_parts
from deltawire.rl.rollout.episode_types import (
    MAX_MESSAGES,
    Episode,
    EpisodeFailure,
    EpisodeLimits,
    T,
    ask_probes,
    checked_reward,
    one_line,
    within,
)
from deltawire.runtime.orphans import track_orphans
from deltawire.wire.rollouts import Thinking, Trajectory


async def run_episode(
    engine: Sampler,
    environment: Environment | AgentHarness,
    text: Text,
    *,
    temperature: float,
    limits: EpisodeLimits,
) -> Episode:
    """Plays one episode to its end or its limits.

    Cancelling it cancels its request, and closes the environment. An error of the environment makes
    the episode a failed one; an error of the engine is raised.
    """
    environment = scaffolded(environment, limits.scaffold)
    if isinstance(environment, AgentHarness):
        try:
            from deltawire.rl.rollout.harness import run_harness
        except ModuleNotFoundError as error:
            raise InputError(
                f"a harness needs the package {error.name}",
                hint="pip install 'deltawire[serve]'",
            ) from error

        return await run_harness(engine, environment, text, temperature=temperature, limits=limits)
    play = _EpisodeRun(engine, environment, text, temperature, limits)
    clock = asyncio.timeout(limits.episode_s)
    with track_orphans() as processes:
        try:
            async with clock:
                await play.run()
        except TimeoutError:
            if not clock.expired():
                raise
            play.fail(f"it took longer than {limits.episode_s:g} s")
        except EpisodeFailure as failure:
            play.fail(str(failure))
        finally:
            await play.close()
            if left := processes.end():
                play.fail(f"it left {left} processes running")
    return play.result()


async def play_all(
    engine: Sampler,
    plays: Sequence[Callable[[], Awaitable[Episode]]],
    *,
    concurrent: int,
    after_step: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Plays the episodes that ``plays`` start, at most ``concurrent`` at a time, while stepping the
    engine; returns them in order. ``after_step`` is called after each step of the engine."""
    gate = asyncio.Semaphore(concurrent)

    async def one(play: Callable[[], Awaitable[Episode]]) -> Episode:
        async with gate:
            return await play()

    together = asyncio.gather(*(one(play) for play in plays))
    try:
        while not together.done():
            await engine.advance()
            after_step()
    finally:
        together.cancel()
    return await together


async def play_tasks(
    engine: Sampler,
    source: TaskSource,
    text: Text,
    tasks: Sequence[Task],
    *,
    temperature: float,
    limits: EpisodeLimits,
    concurrent: int,
    after_step: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Plays one episode of each task, at most ``concurrent`` at a time; returns them in order."""

    def play(task: Task) -> Awaitable[Episode]:
        return run_episode(engine, source.open(task), text, temperature=temperature, limits=limits)

    plays = [partial(play, task) for task in tasks]
    return await play_all(engine, plays, concurrent=concurrent, after_step=after_step)


@dataclass
class _EpisodeSegment:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    routes: list[NDArray[np.int32]] = field(default_factory=list)
    experts: int = 0
    turns: int = 0
    forced: list[tuple[int, int]] = field(default_factory=list)
    thoughts: list[tuple[int, str]] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    thought_end: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def drawn(self, completion: Completion) -> None:
        # Each turn reads all earlier tokens again; the routes of the first reading count.
        read = sum(map(len, self.routes))
        self.routes += [np.concatenate(completion.routes)[read:]] if completion.routes else []
        self.experts = completion.experts
        if isinstance(completion, BoundedCompletion):
            start = len(self.tokens)
            self.mask += completion.mask
            self.forced += [(start + first, start + end) for first, end in completion.forced]
            self.thoughts.append((completion.thinking.thought, completion.thinking.ended))
            if not self.turns:
                self.thought_end = completion.thought_end
        else:
            self.mask += [1] * len(completion.tokens)
        self.tokens += completion.tokens
        self.turn_ends.append(len(self.tokens))
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.turns += 1

    def answered(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [self.versions[-1]] * len(tokens)
        self.mask += [0] * len(tokens)

    def packed_routes(self) -> bytes:
        """The packed expert choices. The model never read the environment's last tokens."""
        return pack_parts(self.routes, positions=self.length - 1, experts=self.experts)


class _EpisodeRun:
    """The state of one episode."""

    def __init__(
        self,
        engine: Sampler,
        environment: Environment,
        text: Text,
        temperature: float,
        limits: EpisodeLimits,
    ) -> None:
        self._cause = ""
        self._engine = engine
        self._environment = environment
        self._text = text
        self._limits = limits
        self._requests = RequestBuilder(text, limits.requests(temperature), budget=limits.budget)
        self._bounds: ThinkingLimits | None = None
        self._prompt: list[int] = []
        self._tools: tuple[Tool, ...] = ()
        self._segments: list[_EpisodeSegment] = []
        self._turns: list[list[int]] = []
        """The turns that are still in the context, each with the answer to it."""
        self._reserve = 0
        self._reward = 0.0
        self._finish = "length"
        self._probes: Mapping[str, float] = {}
        self._solved = False

    async def run(self) -> None:
        """Plays from the reset to the probes; raises `EpisodeFailure`."""
        turn = await self._ask("reset", self._environment.reset)
        self._tools = self._guarded("tools", lambda: tuple(self._environment.tools))
        self._bounds = self._requests.bounds
        self._prompt = self._tokens(lambda: self._requests.prompt(turn.messages, self._tools))
        self._segments = [_EpisodeSegment(self._prompt)]
        if self._limits.on_full == "summary":
            self._reserve = len(self._summary_request([])) + self._limits.summary_tokens
        for number in range(1, self._limits.max_turns + 1):
            completion = await self._draw(reserve=self._reserve)
            self._finish = completion.finish
            action = self._read(completion, number)
            turn = await self._ask("step", lambda action=action: self._environment.step(action))  # type: ignore[misc]
            if turn.done:
                break
            if number == self._limits.max_turns:
                self._finish = "turns"
            elif not await self._answer(turn, completion):
                self._finish = "context"
                break
        self._probes = await ask_probes(self._environment.probes, self._limits.step_s)
        self._solved = self._guarded("solved", lambda: bool(self._environment.solved(self._reward)))

    async def close(self) -> None:
        """Closes the environment; a failure to do so fails the episode."""
        try:
            await within("close", self._environment.close, self._limits.step_s)
        except EpisodeFailure as failure:
            self.fail(str(failure))

    def fail(self, cause: str) -> None:
        """Marks the episode as failed; the first cause is kept."""
        self._cause = self._cause or cause

    def result(self) -> Episode:
        """The episode in its present state."""
        cause = one_line(self._cause)
        reward = 0.0 if cause else self._reward
        drawn = [s for s in self._segments if 1 in s.mask]
        segments = drawn or self._segments[:1] or [_EpisodeSegment([])]
        return Episode(
            self._prompt,
            [self._trajectory(segment, reward, cause) for segment in segments],
            self._solved and not cause,
            cause,
            tuple(self._segments[0].turn_ends) if self._segments else (),
            self._segments[0].thought_end if self._segments else 0,
        )

    def _trajectory(self, segment: _EpisodeSegment, reward: float, cause: str) -> Trajectory:
        own = segment.prompt if segment.prompt != self._prompt else None
        return Trajectory(
            np.array(segment.tokens, np.int32),
            np.minimum(np.array(segment.logprobs, np.float32), 0),
            np.array(segment.versions, np.int32),
            np.array(segment.mask, np.uint8),
            reward,
            self._finish,
            prompt=None if own is None else np.array(own, np.int32),
            turns=max(1, segment.turns),
            cause=cause,
            probes=self._probes,
            routes=segment.packed_routes(),
            thinking=self._thinking_of(segment),
        )

    def _thinking_of(self, segment: _EpisodeSegment) -> Thinking | None:
        if self._bounds is None:
            return None
        return Thinking(self._bounds.budget, tuple(segment.thoughts), tuple(segment.forced))

    async def _draw(
        self, *, max_tokens: int = 0, reserve: int = 0, think: bool = True
    ) -> Completion:
        segment, bounds = self._segments[-1], self._bounds
        sampling = self._requests.sampling(
            segment.length, max_tokens=max_tokens, reserve=reserve, think=think
        )
        prompt = segment.prompt + segment.tokens
        try:
            if bounds is None or not think:
                completion = await self._engine.generate(prompt, sampling)
            else:
                completion = await generate_within(self._engine, prompt, sampling, bounds)
        except InputError as error:
            raise EpisodeFailure(f"the engine refused the prompt: {error}") from error
        segment.drawn(completion)
        return completion

    def _read(self, completion: Completion, number: int) -> Action:
        tokens, thinking = completion.tokens, ""
        if isinstance(completion, BoundedCompletion):
            thinking = self._text.decode(completion.thought_tokens)
            tokens = completion.answer_tokens
        text = self._text.decode(tokens)
        parsed = self._text.read_calls(text, turn=number, tools=self._tools)
        return Action(
            text, parsed.content, parsed.calls, parsed.broken, completion.finish, thinking
        )

    async def _answer(self, turn: Turn, completion: Completion) -> bool:
        """Adds the environment's answer to the context; False if there is no room for it."""
        segment, limits = self._segments[-1], self._limits
        bridge = self._tokens(
            lambda: self._requests.bridge(turn.messages, after=completion.tokens),
        )
        self._turns.append([*completion.tokens, *bridge])
        if segment.length + len(bridge) + self._reserve < limits.context:
            segment.answered(bridge)
            return True
        if limits.on_full == "drop":
            return self._drop_turns()
        if limits.on_full == "summary":
            return await self._summarize(turn, completion)
        return False

    def _drop_turns(self) -> bool:
        """Begins a segment after the prompt and the newest turns, in half of the room."""
        room = self._limits.context - len(self._prompt)
        if len(self._turns[-1]) >= room:
            return False
        kept = [self._turns.pop()]
        while self._turns and sum(map(len, kept)) + len(self._turns[-1]) <= room // 2:
            kept.insert(0, self._turns.pop())
        self._turns = kept
        self._segments.append(_EpisodeSegment(self._prompt + [t for turn in kept for t in turn]))
        return True

    def _summary_request(self, after: list[int]) -> list[int]:
        message = Message("user", self._limits.summary_prompt)
        return self._tokens(lambda: self._requests.bridge([message], after=after))

    async def _summarize(self, turn: Turn, completion: Completion) -> bool:
        """Begins a segment after the prompt and the model's own summary."""
        segment = self._segments[-1]
        segment.answered(self._summary_request(completion.tokens))
        summary = await self._draw(max_tokens=self._limits.summary_tokens, think=False)
        bridge = self._tokens(lambda: self._requests.bridge(turn.messages, after=summary.tokens))
        prompt = [*self._prompt, *summary.tokens, *bridge]
        self._segments.append(_EpisodeSegment(prompt))
        return len(prompt) + self._reserve < self._limits.context

    def _tokens(self, encode: Callable[[], list[int]]) -> list[int]:
        try:
            return encode()
        except InputError as error:
            raise EpisodeFailure(str(error)) from error

    def _guarded(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise EpisodeFailure(f"{what} raised {type(error).__name__}: {error}") from error

    async def _ask(self, what: str, call: Callable[[], Awaitable[Turn]]) -> Turn:
        turn: Any = await within(what, call, self._limits.step_s)
        if not isinstance(turn, Turn):
            raise EpisodeFailure(f"{what} returned {type(turn).__name__}, not a Turn")
        try:
            messages = turn.messages
            reward = checked_reward(what, turn.reward)
        except (TypeError, ValueError) as error:
            raise EpisodeFailure(f"{what} returned an invalid turn: {error}") from error
        if len(messages) > MAX_MESSAGES:
            raise EpisodeFailure(f"{what} returned {len(messages)} messages at once")
        self._reward += reward
        return Turn(
            self._requests.shortened(messages),
            reward,
            bool(turn.done),
        )
