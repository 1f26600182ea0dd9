"""Opens a server of tools for one episode: its session, its tools, and checked calls of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from deltawire.chat.messages import Tool
from deltawire.config.machine import MachinePolicy, machine_policy
from deltawire.config.tasks import ToolServerConfig
from deltawire.envs.mcp.faults import CallFaultError, ToolServerError
from deltawire.envs.mcp.session import McpSession, Transport, packed_arguments
from deltawire.envs.mcp.stdio import StdioTransport
from deltawire.envs.sandbox.box import CommandLimits, Isolation, Sandbox
from deltawire.envs.sandbox.conversation import Conversation
from deltawire.envs.sandbox.plan import valid_path
from deltawire.envs.scoring_process import ScoringError, ScoringProcess, ScoringTimeoutError
from deltawire.errors import InputError

CHECK_S = 5.0
"""Seconds for the check of one call's arguments."""
WAIT_S = 30.0
"""Seconds that a check waits for the others of its server."""
DISK_BYTES = 64 << 20
"""The most bytes of the files that a server gets, and of those that it writes."""
_NAME = re.compile(r"^[A-Za-z0-9_.-]{1,64}\Z")


class SchemaChecks:
    """Checks values against the schemas of one server (`deltawire.envs.mcp.arguments`).

    A schema may take forever. So each server's are checked in a process of their own, one at a
    time, and a tool whose check did not end in time is refused from then on.
    """

    def __init__(self) -> None:
        self._process = ScoringProcess("deltawire.envs.mcp.arguments:check", limit_s=CHECK_S)
        self._refused: set[str] = set()
        # Waiting here, and not for the process's lock, leaves threads to the checks of others.
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]
        self._turns = WeakKeyDictionary()

    async def __call__(self, tool: str, schema: Any, value: Mapping[str, Any] | None) -> None:
        """Checks a value, or without one the schema of ``tool`` itself.

        Raises `ScoringError` with what is wrong, and `ScoringTimeoutError`.
        """
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        try:
            async with asyncio.timeout(WAIT_S):
                await turn.acquire()
        except TimeoutError as error:
            raise ScoringTimeoutError(f"other checks took longer than {WAIT_S:g} s") from error
        try:
            if tool in self._refused:
                raise ScoringTimeoutError("an earlier check took too long")
            await self._process(schema, value)
        except ScoringTimeoutError:
            self._refused.add(tool)
            raise
        finally:
            turn.release()


@dataclass(frozen=True)
class ServerParts:
    """The files of a command, and the checks: the episodes of one configuration share both."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    checks: SchemaChecks = field(default_factory=SchemaChecks)


class McpServer:
    """One server, for one episode.

    Example::

        server = McpServer(config, ServerParts(files_of(config)))
        tools = await server.open()
        text = await server.call("add", {"a": 1, "b": 2})
        await server.close()
    """

    def __init__(self, config: ToolServerConfig, parts: ServerParts) -> None:
        self._config = config
        self._parts = parts
        self._session: McpSession | None = None
        self._tools: dict[str, Tool] = {}
        self._calls = 0

    async def open(self) -> Sequence[Tool]:
        """Starts the server and lists its tools; raises `ToolServerError`."""
        transport = await self._transport()
        self._session = McpSession(
            self._config.name,
            transport,
            start_s=self._config.start_limit_s,
            call_s=self._config.call_limit_s,
        )
        await self._session.start()
        listed = await self._session.list_tools()
        only = set(self._config.only)
        found = [self._tool(one) for one in listed if not only or one.get("name") in only]
        self._tools = {tool.name: tool for tool in found}
        if len(self._tools) < len(found):
            raise self._fault("it has two tools of one name")
        if missing := sorted(only - self._tools.keys()):
            raise self._fault(f"it has no tool {missing[0]}")
        for tool in found:
            try:
                await self._parts.checks(tool.name, tool.parameters, None)
            except (ScoringError, ScoringTimeoutError) as error:
                raise self._fault(f"its tool {tool.name} has no valid schema: {error}") from error
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool with arguments that its schema allows; returns the text of the answer.

        Raises `CallFaultError` with a reason for the model, and `ToolServerError`.
        """
        assert self._session is not None
        if self._calls >= self._config.calls:
            raise CallFaultError(f"the {self._config.calls} calls of this server are used up")
        given = packed_arguments(arguments)
        try:
            await self._parts.checks(name, self._tools[name].parameters, given)
        except ScoringTimeoutError as error:
            raise CallFaultError("the arguments cannot be checked") from error
        except ScoringError as error:
            reason = str(error).removeprefix("ValueError: ")
            raise CallFaultError(f"the arguments do not fit the tool: {reason}") from error
        self._calls += 1
        return await self._session.call(name, given)

    async def close(self) -> None:
        """Ends the session, and the command."""
        if self._session is not None:
            await self._session.close()

    async def _transport(self) -> Transport:
        config = self._config
        most = config.answer_kib << 10
        policy = machine_policy()
        if config.url:
            from deltawire.envs.mcp.http import HttpTransport

            return HttpTransport(policy.require_url(config.url, "task.tool_servers.url"), most=most)
        packages = Path(config.packages) if config.packages else None
        try:
            talk = await Conversation.open(
                _sandbox(config.isolation, policy.ceilings.at_once),
                config.command,
                self._parts.files,
                limits=_limits(config, policy),
                packages=packages,
                wait_s=config.start_limit_s,
            )
        except TimeoutError as error:
            raise self._fault(
                f"no place within {config.start_limit_s:g} s next to at most "
                f"{policy.ceilings.at_once} commands (at_once of the machine's ceilings)"
            ) from error
        return StdioTransport(talk, most=most)

    def _tool(self, described: dict[str, Any]) -> Tool:
        name, text = described.get("name"), described.get("description", "")
        schema = described.get("inputSchema")
        if not isinstance(name, str) or not _NAME.match(name):
            raise self._fault(f"it has a tool with the name {str(name)[:80]!r}")
        if not isinstance(text, str) or not isinstance(schema, dict):
            raise self._fault(f"its tool {name} has no description or no schema")
        return Tool(name, text, schema)

    def _fault(self, reason: str) -> ToolServerError:
        return ToolServerError(f"the tool server {self._config.name}: {reason}"[:1000])


def require_server(config: ToolServerConfig) -> None:
    """Raises `InputError` for a server that this machine does not give to runs, or whose packages
    are not installed; reads and starts nothing."""
    policy = machine_policy()
    if config.url:
        policy.require_url(config.url, "task.tool_servers.url")
    else:
        policy.require_environment("mcp")  # A machine that runs no commands leaves it out.
    policy.require_isolation(config.isolation)
    for name in ("path", "packages"):
        if path := getattr(config, name):
            policy.require_data(path, f"task.tool_servers.{name}")
    from importlib.util import find_spec

    for package in ("jsonschema", "aiohttp") if config.url else ("jsonschema",):
        if find_spec(package) is None:
            raise InputError(
                f"tools of servers need the package {package}",
                hint="pip install 'deltawire[mcp]'",
            )


def files_of(config: ToolServerConfig) -> dict[str, bytes]:
    """Reads the files of a command, once for all episodes.

    Raises `InputError` for files that the sandbox does not take: links, odd names, and more files
    or bytes than the command may have. Caches of compiled Python are left out.
    """
    require_server(config)
    if not config.path:
        return {}
    root, limits = Path(config.path), _limits(config, machine_policy())
    paths = [root] if root.is_file() else root.rglob("*")
    found: dict[str, bytes] = {}
    size = 0
    for path in paths:
        name = path.name if path == root else path.relative_to(root).as_posix()
        if "__pycache__" in name.split("/"):
            continue
        if path.is_symlink() or not valid_path(name):
            raise InputError(
                f"task.tool_servers.path {root} holds {name[:200]!r}: a link, or no plain name",
                hint="name a folder with the server's files only",
            )
        if path.is_dir():
            continue
        size += path.stat().st_size
        if size > limits.disk_bytes or len(found) == limits.files or not path.is_file():
            raise InputError(
                f"task.tool_servers.path {root} holds more than {limits.files} files or "
                f"{limits.disk_bytes >> 20} MiB, or what is no file",
                hint="name a folder with the server's files only",
            )
        found[name] = path.read_bytes()
    if not found:
        raise InputError(f"task.tool_servers.path {root} names no file")
    return found


def open_server(config: ToolServerConfig) -> Callable[[], McpServer]:
    """Returns a function that makes the server of one episode; raises like `files_of`."""
    return partial(McpServer, config, ServerParts(files_of(config)))


def _limits(config: ToolServerConfig, policy: MachinePolicy) -> CommandLimits:
    """The limits of a command: the configuration's, within the machine's ceilings."""
    usual = CommandLimits()
    return CommandLimits(
        wall_s=policy.at_most("wall_s", config.limit_s),
        cpu_s=policy.at_most("cpu_s", config.cpu_s),
        cores=int(policy.at_most("cores", usual.cores)),
        memory_bytes=int(policy.at_most("memory_mib", config.memory_mib)) << 20,
        processes=int(policy.at_most("processes", config.processes)),
        disk_bytes=int(policy.at_most("disk_mib", DISK_BYTES >> 20)) << 20,
        files=int(policy.at_most("files", usual.files)),
        output_bytes=int(policy.at_most("output_kib", usual.output_bytes >> 10)) << 10,
    )


@cache
def _sandbox(isolation: Isolation, at_once: int) -> Sandbox:
    return Sandbox(isolation=isolation, at_once=at_once)
