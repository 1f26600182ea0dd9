"""Tasks for an unmodified agent harness that calls an OpenAI-compatible chat endpoint.

::

    async def solve(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="policy", messages=[…])
        return 1.0 if answer.choices[0].message.content == task["answer"] else 0.0

    def tasks(config, *, seed):
        return ChatTasks(solve, train, heldout=heldout, seed=seed)

with ``task.environment = "my_module:tasks"``. A harness that is not a coroutine function runs in a
separate thread, since the endpoint that it waits for runs in the worker's event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltawire.envs.base import AgentHarness, ModelEndpoint, Task
from deltawire.errors import InputError

Harness = Callable[[str, str, Any], Awaitable[float]] | Callable[[str, str, Any], float]
"""Called with the endpoint's base URL, the key for it, and the task; returns the reward."""


@dataclass
class _ChatEpisode(AgentHarness):
    harness: Harness
    data: Any

    async def drive(self, endpoint: ModelEndpoint) -> float:
        if inspect.iscoroutinefunction(self.harness):
            return float(await self.harness(endpoint.base_url, endpoint.api_key, self.data))
        found: Any = await asyncio.to_thread(
            self.harness, endpoint.base_url, endpoint.api_key, self.data
        )
        if inspect.isawaitable(found):
            found = await found
        return float(found)


class ChatTasks:
    """A `TaskSource` over lists of tasks of any type, preferably JSON.

    ``family`` returns the kind of a task. Raises `InputError` for an empty list.
    """

    def __init__(
        self,
        harness: Harness,
        train: Sequence[Any],
        *,
        heldout: Sequence[Any],
        seed: int,
        family: Callable[[Any], str] = lambda _: "",
    ) -> None:
        if not train or not heldout:
            raise InputError("a harness needs tasks for training and others that are held out")
        self._harness = harness
        self._train = train
        self._seed = seed
        self._family = family
        self._heldout = [self._task(data) for data in heldout]

    def draw(self, stream: str, index: int) -> Task:
        """Draws any of the training tasks."""
        draw = random.Random(f"{self._seed} {stream} {index}")
        return self._task(self._train[draw.randrange(len(self._train))])

    def heldout(self) -> list[Task]:
        """The held-out tasks."""
        return self._heldout

    def open(self, task: Task) -> AgentHarness:
        """Opens a fresh run of the harness."""
        return _ChatEpisode(self._harness, task.data)

    def _task(self, data: Any) -> Task:
        return Task(_identity(data), data, self._family(data)[:64])


def _identity(data: Any) -> str:
    if isinstance(data, Mapping) and isinstance(data.get("id"), str | int):
        return str(data["id"])[:200]
    digest = hashlib.blake2b(json.dumps(data, sort_keys=True, default=str).encode(), digest_size=12)
    return digest.hexdigest()
