"""Tools of servers for the episodes of any environment.

::

    model ─▶ action ─┬─ calls of a server's tools ─▶ server ─▶ messages with the answers
                     └─ the rest: text, other calls ─▶ environment ─▶ messages, reward, end

The environment sees a turn only if there is something for it: an answer without calls, or calls of
its own tools. So a question with tools is answered by the first turn that calls none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from deltawire.chat.messages import Message, Tool, ToolCall
from deltawire.envs.base import (
    Action,
    AgentHarness,
    Environment,
    Task,
    TaskSource,
    TasksWithAnswers,
    Turn,
    call_end,
)
from deltawire.envs.mcp.faults import CallFaultError
from deltawire.errors import InputError

MAX_CALLS = 32
"""The most calls of one turn that are carried out."""
MAX_QUOTED = 200
"""The most characters of the model's own text that an answer repeats."""


CALLS_SHARE = 0.8
"""The share of a step's time that calls of servers may take; the rest is for the environment."""


class ToolServer(Protocol):
    """A server of tools for one episode."""

    async def open(self) -> Sequence[Tool]:
        """Connects; returns the tools. Any exception fails the episode."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool. `CallFaultError` is told to the model; anything else fails the episode."""
        ...

    async def close(self) -> None:
        """Disconnects; called once, also after a failed `open`."""
        ...


class TasksWithTools:
    """A `TaskSource` whose episodes have tools of servers next to their own.

    ``servers`` are functions, each of which makes a server for one episode. The tasks are those of
    ``source``. Episodes are not deterministic, whatever ``source`` says: the servers answer them.

    Example::

        tasks = TasksWithTools(source, [open_server(config)])
    """

    deterministic = False

    def __init__(self, source: TaskSource, servers: Sequence[Callable[[], ToolServer]]) -> None:
        self._source = source
        self._servers = servers
        self.may_time_out = bool(getattr(source, "may_time_out", False))
        epoch = getattr(source, "epoch", None)
        if epoch is not None:
            self.epoch = epoch

    def draw(self, stream: str, index: int) -> Task:
        """See `deltawire.envs.base.TaskSource`."""
        return self._source.draw(stream, index)

    def heldout(self) -> list[Task]:
        """See `deltawire.envs.base.TaskSource`."""
        return self._source.heldout()

    def open(self, task: Task) -> Environment:
        """Opens a fresh episode; raises `InputError` for a harness, which brings its own tools."""
        inner = self._source.open(task)
        if isinstance(inner, AgentHarness):
            raise InputError(
                "task.tools are for environments, and this one is a harness",
                hint="let the harness connect to the server",
            )
        return ToolEpisode(inner, [make() for make in self._servers])

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """See `deltawire.envs.base.TasksWithAnswers`."""
        return self._answering().prompt(task)

    def answer(self, task: Task) -> str:
        """See `deltawire.envs.base.TasksWithAnswers`."""
        return self._answering().answer(task)

    def question(self, task: Task) -> str:
        """See `deltawire.envs.base.TasksWithAnswers`."""
        return self._answering().question(task)

    def _answering(self) -> TasksWithAnswers:
        if not isinstance(self._source, TasksWithAnswers):
            raise InputError(
                "the tasks have no answers for a warm start", hint="set warm_start.max_steps to 0"
            )
        return self._source


class ToolEpisode(Environment):
    """An episode of ``inner`` with the tools of ``servers``."""

    def __init__(self, inner: Environment, servers: Sequence[ToolServer]) -> None:
        self._inner = inner
        self._servers = servers
        self._of_tool: dict[str, ToolServer] = {}
        self._tools: tuple[Tool, ...] = ()

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools of the environment, then those of each server in order."""
        return self._tools

    async def reset(self) -> Turn:
        """Connects to the servers, and begins the episode."""
        opening = [asyncio.ensure_future(server.open()) for server in self._servers]
        try:
            listed = await asyncio.gather(*opening)
        finally:  # `close` closes what is open by then, so nothing may open later.
            for one in opening:
                one.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
        turn = await self._inner.reset()
        own = tuple(self._inner.tools)
        for server, tools in zip(self._servers, listed, strict=True):
            for tool in tools:
                if tool.name in self._of_tool or any(tool.name == one.name for one in own):
                    raise InputError(f"two tools have the name {tool.name}")
                self._of_tool[tool.name] = server
        self._tools = (*own, *(tool for tools in listed for tool in tools))
        return turn

    async def step(self, action: Action) -> Turn:
        """Carries out calls of the servers' tools, and passes the rest on to the environment."""
        own = {tool.name for tool in self._inner.tools}
        rest = tuple(call for call in action.calls if call.name in own)
        now = asyncio.get_running_loop().time()
        until = now + CALLS_SHARE * (call_end.get() - now)
        said = [await self._answer(call, until) for call in self._served(action, own)]
        if len(action.calls) - len(rest) > MAX_CALLS:
            said.append(Message("user", f"Only the first {MAX_CALLS} calls were carried out."))
        if not own:
            said += [
                Message("user", f"This is not a valid tool call: {piece[:MAX_QUOTED]}")
                for piece in action.broken[:MAX_CALLS]
            ]
        if said and not rest and not (own and action.broken):
            return Turn(said)
        turn = await self._inner.step(replace(action, calls=rest))
        return Turn([*said, *turn.messages], turn.reward, turn.done)

    def _served(self, action: Action, own: set[str]) -> list[ToolCall]:
        return [call for call in action.calls if call.name not in own][:MAX_CALLS]

    async def _answer(self, call: ToolCall, until: float) -> Message:
        clock = asyncio.timeout_at(until if math.isfinite(until) else None)
        try:
            if asyncio.get_running_loop().time() >= until:
                raise CallFaultError("the time of this turn is used up")
            server = self._of_tool.get(call.name)
            if server is None:
                raise CallFaultError(f"there is no tool {call.name[:MAX_QUOTED]!r}")
            async with clock:
                text = await server.call(call.name, call.arguments)
        except TimeoutError:
            if not clock.expired():
                raise
            text = "error: the time of this turn is used up"
        except CallFaultError as fault:
            text = f"error: {fault}"
        return Message("tool", text, name=call.name, call=call.identity)

    async def probes(self) -> Mapping[str, float]:
        """See `deltawire.envs.base.Environment`."""
        return await self._inner.probes()

    async def close(self) -> None:
        """Disconnects from every server, and closes the environment."""
        closing = [self._inner.close(), *(server.close() for server in self._servers)]
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def solved(self, total_reward: float) -> bool:
        """See `deltawire.envs.base.Environment`."""
        return self._inner.solved(total_reward)
