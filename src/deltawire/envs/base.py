"""The environment protocol: one episode is a reset and some steps.

The loop (`deltawire.rl.rollout.episode`) calls, in this order and never two at a time::

    reset ─▶ step ─▶ step … ─▶ probes ─▶ close

Every call is awaited under a time limit and may be cancelled at any await; `close` is called once,
whatever happened before. An environment speaks messages. Turning them into tokens, once and for
good, is the loop's work, as are limits on how much of a message the model gets to read.

Whatever a call raises makes the episode a failed one, with its cause: it is counted and not
trained on. What the *model* does wrong (a call of no tool, arguments that do not fit) is no
failure: answer it with a message and the reward that it deserves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from deltawire.chat.messages import Message, Tool, ToolCall

__all__ = [
    "Access",
    "Action",
    "AgentHarness",
    "AnsweredTasks",
    "Environment",
    "Message",
    "Task",
    "TaskSource",
    "Tool",
    "ToolCall",
    "Turn",
]


@dataclass(frozen=True)
class Task:
    """One problem. ``identity`` names it for ever, ``family`` its kind, for statistics that should
    not mix kinds; ``data`` is the environment's own."""

    identity: str
    data: Any
    family: str = ""


@dataclass(frozen=True)
class Action:
    """What the model wrote in one turn.

    ``text`` is all of it but special tokens; ``content`` the same without its tool calls.
    ``broken`` holds each piece that began as a tool call and is none (no JSON, no name, cut off):
    an environment that overlooks these teaches the model to write them.
    ``finish`` is ``length`` if the model was cut off and ``stop`` if it ended by itself.
    """

    text: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()
    finish: str = "stop"


@dataclass(frozen=True)
class Turn:
    """What the environment answers: messages that the model reads next, the reward earned since
    the last turn, and whether the episode is over. A string stands for one message of a user's."""

    said: str | Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said, as messages; of an empty string, none."""
        if isinstance(self.said, str):
            return (Message("user", self.said),) if self.said else ()
        return tuple(self.said)


class Environment(Protocol):
    """One episode of one task. Instances are not shared between episodes.

    Inherit from it to get the defaults: no tools, no probes, nothing to close.
    """

    @property
    def tools(self) -> Sequence[Tool]:
        """What the model may call; the same from `reset` to the end."""
        return ()

    async def reset(self) -> Turn:
        """Begin; the turn's messages are the prompt. The same task always gives the same prompt."""
        ...

    async def step(self, action: Action) -> Turn:
        """Take what the model wrote since the last turn."""
        ...

    async def probes(self) -> Mapping[str, float]:
        """Checks that the reward does not see, once the episode is over; finite numbers by name."""
        return {}

    async def close(self) -> None:
        """Give back processes, files, connections. Called once, also after a failed `reset`."""
        return

    def solved(self, total_reward: float) -> bool:
        """Whether an episode that earned this reward counts as correct in an evaluation."""
        return total_reward >= 1.0


@dataclass(frozen=True)
class Access:
    """Where a harness finds the model: an OpenAI-compatible endpoint of its episode's own."""

    base_url: str
    api_key: str
    model: str


class AgentHarness(ABC):
    """One episode of a harness that asks the model itself, by HTTP, as often and in whatever
    conversations it likes. It is one call under the episode's time limit, then as an `Environment`.
    """

    @abstractmethod
    async def drive(self, access: Access) -> float:
        """Run the harness; returns the reward."""

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
    """Draws tasks; everything it returns follows from its own settings and the arguments."""

    def draw(self, stream: str, index: int) -> Task:
        """Task number ``index`` of a worker's stream; never one of `heldout`."""
        ...

    def heldout(self) -> list[Task]:
        """The tasks that are evaluated on and never drawn."""
        ...

    def open(self, task: Task) -> Environment | AgentHarness:
        """A fresh episode of ``task``."""
        ...


@runtime_checkable
class AnsweredTasks(TaskSource, Protocol):
    """Tasks of one question each whose answers are known: a warm start can learn from them."""

    def prompt(self, task: Task) -> str:
        """The text before the answer."""
        ...

    def answer(self, task: Task) -> str:
        """The right answer; raises `InputError` if this task has none."""
        ...

    def question(self, task: Task) -> str:
        """What makes two tasks the same."""
        ...
