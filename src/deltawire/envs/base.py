"""The environment protocol: an episode is a reset and some steps.

The loop (`deltawire.rl.rollout.episode`) makes these calls in order, one at a time::

    reset ─▶ step ─▶ step … ─▶ probes ─▶ close

Every call is awaited under a time limit and may be cancelled at any await; `close` is called once,
whatever happened before. An environment exchanges messages. The loop turns them into tokens and
limits how much of a message the model reads.

An exception from a call makes the episode a failed one, with its cause: it is counted and not
trained on. A mistake of the *model* (a call of an unknown tool, arguments that do not fit) is not a
failure: answer it with a message and the reward that it deserves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from deltawire.chat.messages import Message, Tool, ToolCall

__all__ = [
    "Action",
    "AgentHarness",
    "Environment",
    "Message",
    "ModelEndpoint",
    "Task",
    "TaskSource",
    "TasksWithAnswers",
    "Tool",
    "ToolCall",
    "Turn",
    "call_end",
]

call_end: ContextVar[float] = ContextVar("call_end", default=math.inf)
"""The time of the event loop, in seconds, at which the present call of an environment is cut off.
"""


@dataclass(frozen=True)
class Task:
    """One problem. ``identity`` is its permanent name and ``family`` its kind, for statistics that
    should not mix kinds; only the environment reads ``data``.

    Example::

        Task("addition/17", {"question": "2+3=", "answer": "5"}, family="addition")
    """

    identity: str
    data: Any
    family: str = ""


@dataclass(frozen=True)
class Action:
    """The model's output of one turn.

    ``text`` is all of it without special tokens; ``content`` the same without its tool calls.
    ``broken`` holds each piece that began as a tool call and is not a valid one (invalid JSON, no
    name, cut off): an environment that ignores these teaches the model to write them. ``finish`` is
    ``length`` if the model was cut off and ``stop`` if it ended its turn. In a run with a thinking
    budget, ``text`` and ``content`` are the answer, and ``thinking`` is the text before it, marks
    included.

    Example::

        async def step(self, action: Action) -> Turn:
            return Turn(reward=float(action.content.strip() == "5"), done=True)
    """

    text: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()
    finish: str = "stop"
    thinking: str = ""


@dataclass(frozen=True)
class Turn:
    """The environment's answer: messages that the model reads next, the reward earned since the
    last turn, and whether the episode is over. A string stands for one message of a user.

    Example::

        Turn([Message("tool", "5", call=call.identity)], reward=1.0, done=True)
    """

    said: str | Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages; an empty string is none."""
        if isinstance(self.said, str):
            return (Message("user", self.said),) if self.said else ()
        return tuple(self.said)


class Environment(Protocol):
    """One episode of one task. Instances are not shared between episodes.

    Inherit from it to get the defaults: no tools, no probes, nothing to close.

    Example::

        class Echo(Environment):
            async def reset(self) -> Turn:
                return Turn("Say hello.")

            async def step(self, action: Action) -> Turn:
                return Turn(reward=float("hello" in action.text), done=True)
    """

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools that the model may call; the same from `reset` to the end."""
        return ()

    async def reset(self) -> Turn:
        """Begins the episode; the turn's messages are the prompt, the same for the same task."""
        ...

    async def step(self, action: Action) -> Turn:
        """Reacts to the model's output since the last turn."""
        ...

    async def probes(self) -> Mapping[str, float]:
        """Checks that are not part of the reward, after the episode; finite numbers by name."""
        return {}

    async def close(self) -> None:
        """Releases processes, files, connections. Called once, also after a failed `reset`."""
        return

    def solved(self, total_reward: float) -> bool:
        """Returns whether an episode that earned this reward counts as correct in an evaluation."""
        return total_reward >= 1.0


@dataclass(frozen=True)
class ModelEndpoint:
    """The address of the model for a harness: an OpenAI-compatible endpoint for one episode.

    Example::

        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        await client.chat.completions.create(model=endpoint.model, messages=[...])
    """

    base_url: str
    api_key: str
    model: str


class AgentHarness(ABC):
    """One episode of an agent harness, which calls the model by HTTP, as often and in whatever
    conversations it likes. `drive` is one call under the episode's time limit; the other calls are
    those of an `Environment`.

    Example::

        class Solve(AgentHarness):
            async def drive(self, endpoint: ModelEndpoint) -> float:
                return await my_agent(endpoint.base_url, endpoint.api_key)
    """

    verify: Callable[[Sequence[Message], str], float] | None = None
    """A method that scores an answer to a conversation, for requests with ``n_adaptive`` by a
    verifier; it must not know the task's solution, or the harness would not need the model."""

    @abstractmethod
    async def drive(self, endpoint: ModelEndpoint) -> float:
        """Runs the harness; returns the reward."""

    async def probes(self) -> Mapping[str, float]:
        """See `Environment.probes`."""
        return {}

    async def close(self) -> None:
        """See `Environment.close`."""
        return

    def solved(self, total_reward: float) -> bool:
        """See `Environment.solved`."""
        return total_reward >= 1.0


class TaskSource(Protocol):
    """Draws tasks; everything it returns is a function of its settings and the arguments.

    A class attribute ``deterministic = True`` declares that an episode depends on the model's
    tokens only: played again with the same tokens, it says the same and earns the same reward. The
    trainer then plays a sample of episodes again and quarantines workers that report other rewards
    (`deltawire.rl.evaluate.rescoring`). Without it, rewards are what workers say. With
    ``may_time_out``, a reward of 0 may also be that of an answer which took too long to score.

    Example::

        class Additions:
            deterministic = True

            def draw(self, stream: str, index: int) -> Task:
                return Task(f"{index}+1", index)

            def heldout(self) -> list[Task]:
                return []

            def open(self, task: Task) -> Environment:
                return QuestionEpisode(score=..., prompt=f"{task.data}+1=")
    """

    def draw(self, stream: str, index: int) -> Task:
        """Draws task ``index`` of a worker's stream; never one of `heldout`."""
        ...

    def heldout(self) -> list[Task]:
        """The tasks for evaluation, which are never drawn."""
        ...

    def open(self, task: Task) -> Environment | AgentHarness:
        """Opens a fresh episode of ``task``."""
        ...


@runtime_checkable
class TasksWithAnswers(TaskSource, Protocol):
    """Tasks of one question each with known answers, from which a warm start can learn."""

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """The text before the answer, or the messages."""
        ...

    def answer(self, task: Task) -> str:
        """The correct answer; raises `InputError` if this task has none."""
        ...

    def question(self, task: Task) -> str:
        """The text that identifies the task."""
        ...
