"""A scripted model and environment that cost almost nothing, to measure the loop's work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltawire.engines.base import Completion, OnToken, Sampling
from deltawire.envs.base import Action, Environment, Task, Turn

TOKEN = ord("x")
"""The token that every draw returns."""


@dataclass
class _Request:
    completion: Completion
    done: asyncio.Future[Completion]


class ScriptedEngine:
    """A `deltawire.engines.base.Sampler` that draws one token of fixed text: a whole completion, in
    the next call of `advance`."""

    def __init__(self, *, slots: int, capacity: int = 1 << 20) -> None:
        self.version = 0
        self.slots = slots
        self.capacity = capacity
        self.most = 0
        """The most requests that were under way at once."""
        self._requests: list[_Request] = []

    @property
    def active(self) -> int:
        """Requests not yet finished."""
        return len(self._requests)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> Completion:
        """See `Sampler`."""
        del prompt, on_token
        count = sampling.max_tokens
        completion = Completion([TOKEN] * count, [-1.0] * count, [self.version] * count, "stop")
        request = _Request(completion, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self.most = max(self.most, len(self._requests))
        return await request.done

    async def advance(self) -> int:
        """Answers all waiting requests."""
        requests, self._requests = self._requests[: self.slots], self._requests[self.slots :]
        for request in requests:
            if not request.done.done():
                request.done.set_result(request.completion)
        await asyncio.sleep(0)
        return sum(len(request.completion.tokens) for request in requests)

    def cancel_all(self) -> None:
        """Forgets every request."""
        self._requests = []


class ScriptedEnvironment(Environment):
    """A fixed number of turns, each answered by the same few words; half of the episodes earn a
    reward."""

    def __init__(self, turns: int, *, reward: float, seen: Callable[[int], None]) -> None:
        self._turns = turns
        self._reward = reward
        self._seen = seen

    async def reset(self) -> Turn:
        """The prompt."""
        self._seen(1)
        return Turn("repair the fault\n")

    async def step(self, action: Action) -> Turn:
        """Returns the next few words."""
        del action
        self._turns -= 1
        if self._turns > 0:
            return Turn("and then?\n")
        return Turn(reward=self._reward, done=True)

    async def close(self) -> None:
        """Counts this environment as closed."""
        self._seen(-1)


class ScriptedTasks:
    """Opens environments, and counts how many are open."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.open_now = 0
        self.most = 0
        self._opened = 0

    def draw(self, index: int) -> Task:
        """Task number ``index``."""
        return Task(f"scripted/{index}", None, "scripted")

    def open(self, task: Task) -> ScriptedEnvironment:
        """A fresh episode."""
        del task
        self._opened += 1
        return ScriptedEnvironment(self.turns, reward=float(self._opened % 2), seen=self._count)

    def _count(self, change: int) -> None:
        self.open_now += change
        self.most = max(self.most, self.open_now)
