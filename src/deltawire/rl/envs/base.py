"""The environment interface: one episode is a reset and some steps, all of them cancellable.

An environment speaks text; turning text into tokens, once and for good, is the episode's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One problem. ``identity`` names it for ever, ``data`` is the environment's own."""

    identity: str
    data: Any


@dataclass(frozen=True)
class Turn:
    """What the environment answers: text that the model reads next, the reward earned since the
    last turn, and whether the episode is over."""

    text: str
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode of one task. Instances are not shared between episodes."""

    async def reset(self) -> Turn:
        """Begin; the turn's text is the prompt. The same task always gives the same prompt."""
        ...

    async def step(self, action: str) -> Turn:
        """Take what the model wrote since the last turn."""
        ...

    def solved(self, total_reward: float) -> bool:
        """Whether an episode that earned this reward counts as correct in an evaluation."""
        ...


class TaskSource(Protocol):
    """Draws tasks; everything it returns follows from its own settings and the arguments."""

    def draw(self, stream: str, index: int) -> Task:
        """Task number ``index`` of a worker's stream; never one of `heldout`."""
        ...

    def heldout(self) -> list[Task]:
        """The tasks that are evaluated on and never drawn."""
        ...

    def open(self, task: Task) -> Environment:
        """A fresh episode of ``task``."""
        ...
