"""Plays environments of OpenEnv, by the URL of a server or with a server that is started here.

::

    [task]
    environment = "openenv"
    heldout = 20
    options = { url = "http://10.0.0.7:8000", action = "message", observation = "echoed_message" }

Concurrency: each episode is a session of its own on the server::

    episode ─▶ WebSocket /ws ─▶ session: reset, step, step, …, state, close
    episode ─▶ WebSocket /ws ─▶ session
                  └─ no room, or nobody there yet: it asks again until ``connect_limit_s``

The wire is spoken here, and the package ``openenv`` is needed by the server only: what a server
says is limited before it is kept, and the pins of that package hold for the server's interpreter
alone (``interpreters`` of `deltawire.config.machine`). A connection that is lost in an episode has
lost the session with it, so it fails the episode; the next one connects again.

Protocol: https://github.com/meta-pytorch/OpenEnv, ``src/openenv/core/env_server``
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from deltawire.chat.messages import Message, Tool, ToolCall
from deltawire.config import TaskConfig
from deltawire.config.machine import machine_policy
from deltawire.config.own_code import require_code
from deltawire.envs.base import Action, Environment, Task, Turn
from deltawire.envs.mcp.server import SchemaChecks
from deltawire.envs.scoring_process import ScoringError, ScoringTimeoutError
from deltawire.errors import InputError

TOOL = "act"
"""The tool that takes an action, where no field of it takes the model's text."""
MAX_SCHEMA_BYTES = 1 << 20
_SEEDS = 1 << 31
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 2.0
_FAREWELL_S = 2.0
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHASHSEED", "LANG", "LC_ALL", "TMPDIR", "HOME")
_BOOT = """
import os, socket, sys, threading
def end():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=end, daemon=True).start()
listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listening.getsockname()[1], flush=True)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
import uvicorn
uvicorn.Server(uvicorn.Config(sys.argv[1], log_level="error")).run(sockets=[listening])
"""
"""Tells its port, and serves an application until the process that started it is gone. Clients that
connect while the application is still imported wait."""


class OpenEnvError(Exception):
    """The server failed; the episode has failed with it."""


class OpenEnvOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``task.options``: the server, and how messages and actions become each other."""

    url: Annotated[str, Meta(max_length=2048, pattern=r"^(https?://[^\s,]+)?\Z")] = ""
    """The address of a server that this machine lets runs reach."""
    server: Annotated[str, Meta(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?\Z")] = ""
    """Or ``module:application`` of a module that this machine trusts, started here."""
    reset: dict[str, Any] = {}
    """Arguments of `reset`, next to a task's seed."""
    action: Annotated[str, Meta(max_length=128)] = ""
    """The field of an action that takes the model's text. If empty, the model calls the tool
    ``act``, whose arguments are an action."""
    fixed: dict[str, Any] = {}
    """Further fields of every action."""
    observation: Annotated[str, Meta(max_length=128)] = ""
    """The field of an observation that the model reads; all of them as JSON, if empty."""
    prompt: Annotated[str, Meta(max_length=100_000)] = ""
    """A text before the first observation."""
    probes: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] = []
    """Fields of the session's state that are reported with the episode; numbers."""
    solved_at: float = 1.0
    """The reward of an episode that counts as correct in an evaluation."""
    message_kib: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    """The longest message of the server."""
    call_limit_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    connect_limit_s: Annotated[float, Meta(gt=0, le=3600)] = 100.0
    """Seconds for the start of a session; it is asked for again and again."""


class OpenEnvTasks:
    """A `TaskSource` whose tasks are seeds. Held-out seeds are the first ones, for every run.

    Raises `InputError` for wrong options, a URL that this machine does not let runs reach, and a
    module that it does not trust.

    Example::

        config = TaskConfig(environment="openenv", options={"server": "my_env.server.app:app"})
        tasks = OpenEnvTasks(config, seed=0)
        episode = tasks.open(tasks.draw("w0", 0))
    """

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        modules_of(config)
        self._options = options_of(config)
        if self._options.server:
            require_code("task.options", self._options.server)
        self._seed = seed
        self._count = config.heldout
        self._server = OpenEnvServer(self._options)
        place = self._options.server or self._options.url.partition("://")[2]
        self._family = re.sub(r"[^A-Za-z0-9_.-]", "-", place)[:64]

    def draw(self, stream: str, index: int) -> Task:
        """Draws a seed that is not held out."""
        digest = hashlib.blake2b(f"{self._seed} {stream} {index}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") % (_SEEDS - self._count)
        return self._task(self._count + number)

    def heldout(self) -> list[Task]:
        """The first seeds."""
        return [self._task(number) for number in range(self._count)]

    def open(self, task: Task) -> OpenEnvEpisode:
        """Opens a fresh episode; it connects when it is reset."""
        return OpenEnvEpisode(self._server, self._options, task.data)

    def _task(self, number: int) -> Task:
        return Task(f"{self._family}/{number}", number, self._family)


class OpenEnvEpisode(Environment):
    """One session of a server."""

    def __init__(self, server: OpenEnvServer, options: OpenEnvOptions, seed: int) -> None:
        self._server = server
        self._options = options
        self._seed = seed
        self._session: _EnvironmentSession | None = None
        self._schemas: Mapping[str, Any] = {}

    @property
    def tools(self) -> Sequence[Tool]:
        """The tool that acts, unless the model's text does."""
        if self._options.action:
            return ()
        return (Tool(TOOL, "Acts in the environment.", self._action_schema()),)

    async def reset(self) -> Turn:
        """Connects, and begins the session; raises `OpenEnvError` if there is none in time."""
        self._session, first = await self._connected()
        turn = await self._turn(first, first=True)
        said = turn.messages[0].content if turn.messages else ""
        return Turn(f"{self._options.prompt}{said}", turn.reward, turn.done)

    async def step(self, action: Action) -> Turn:
        """Acts; an action that is none is told to the model."""
        call: ToolCall | None = None
        if self._options.action:
            text = (action.content or action.text).strip()
            asked: dict[str, Any] = {self._options.action: text}
        else:
            call = next((one for one in action.calls if one.name == TOOL), None)
            if call is None:
                return Turn(f"Call the tool {TOOL} once.")
            asked = dict(call.arguments)
        asked |= self._options.fixed
        fault = await self._fault("action", self._action_schema(), asked)
        answer: dict[str, Any] = {}
        if not fault:
            assert self._session is not None
            answer = await self._session.ask("step", asked, self._options.call_limit_s)
            if answer.get("type") == "error":
                fault = _told(answer)
                if _code(answer) != "VALIDATION_ERROR":
                    raise OpenEnvError(f"step failed on the server: {fault}")
        if fault:
            return Turn([_message(f"error: {fault}", call)])
        return await self._turn(answer, call=call)

    async def probes(self) -> Mapping[str, float]:
        """The numbers of the state that ``probes`` names, as far as it has them; raises
        `OpenEnvError` for what is no number."""
        if not self._options.probes or self._session is None:
            return {}
        answer = await self._session.ask("state", None, self._options.call_limit_s)
        state = answer.get("data")
        if answer.get("type") != "state" or not isinstance(state, dict):
            raise OpenEnvError("the server's state is none")
        if fault := await self._fault("state", self._schemas.get("state"), state):
            raise OpenEnvError(f"the server's state does not fit its schema: {fault}")
        named = [name for name in self._options.probes if name in state]
        return {name: _number(state[name], name) for name in named}

    async def close(self) -> None:
        """Ends the session."""
        if self._session is not None:
            await self._session.close()

    def solved(self, total_reward: float) -> bool:
        """Returns whether the reward reaches ``solved_at``."""
        return total_reward >= self._options.solved_at

    async def _connected(self) -> tuple[_EnvironmentSession, dict[str, Any]]:
        """A session, and its answer to `reset`; tries again while there is no room or nobody."""
        delay, reason = _FIRST_DELAY_S, "no answer"
        try:
            async with asyncio.timeout(self._options.connect_limit_s):
                while True:
                    try:
                        return await self._begin()
                    except _NotYetError as error:
                        reason = str(error)
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _LONGEST_DELAY_S)
        except TimeoutError as error:
            limit = self._options.connect_limit_s
            raise OpenEnvError(f"no session within {limit:g} s: {reason}"[:1000]) from error

    async def _begin(self) -> tuple[_EnvironmentSession, dict[str, Any]]:
        options = self._options
        url = await self._server.url()
        self._schemas = await self._server.schemas(url)
        session = await _EnvironmentSession.open(url, most=options.message_kib << 10)
        try:
            asked = {**options.reset, "seed": self._seed}
            answer = await session.ask("reset", asked, options.call_limit_s)
            if answer.get("type") == "error":
                if _code(answer) == "CAPACITY_REACHED":
                    raise _NotYetError(_told(answer))
                raise OpenEnvError(f"reset failed on the server: {_told(answer)}")
        except BaseException:
            await session.close()
            raise
        return session, answer

    async def _turn(
        self, answer: dict[str, Any], *, first: bool = False, call: ToolCall | None = None
    ) -> Turn:
        """Checks an observation, and makes a turn of it."""
        data = answer.get("data")
        if answer.get("type") != "observation" or not isinstance(data, dict):
            raise OpenEnvError(f"the server answered {str(answer.get('type'))[:40]!r}")
        observation, done = data.get("observation"), data.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise OpenEnvError("the server's observation is none")
        schema = self._schemas.get("reset_observation") if first else None
        schema = schema or self._schemas.get("observation")
        if fault := await self._fault("observation", schema, observation):
            raise OpenEnvError(f"the server's observation does not fit its schema: {fault}")
        reward = data.get("reward")
        number = 0.0 if reward is None else _number(reward, "reward")
        return Turn([_message(self._shown(observation), call)], number, done)

    def _shown(self, observation: dict[str, Any]) -> str:
        if name := self._options.observation:
            if name not in observation:
                raise OpenEnvError(f"the server's observation has no {name}")
            value = observation[name]
        else:
            value = {name: one for name, one in observation.items() if name != "metadata"}
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _action_schema(self) -> dict[str, Any]:
        """The schema of an action, without the member that is for programs."""
        schema = dict(self._schemas.get("action") or {"type": "object"})
        properties = schema.get("properties")
        if isinstance(properties, dict):
            hidden = {"metadata"} if self._options.action else {"metadata", *self._options.fixed}
            schema["properties"] = {k: v for k, v in properties.items() if k not in hidden}
            if self._options.fixed:
                schema.pop("additionalProperties", None)
            if isinstance(required := schema.get("required"), list):
                schema["required"] = [one for one in required if one not in hidden]
        return schema

    async def _fault(self, what: str, schema: Any, value: dict[str, Any]) -> str:
        """Why a value does not fit a schema; empty if it does, or if there is no schema."""
        if not isinstance(schema, dict):
            return ""
        try:
            await self._server.checks(what, schema, value)
        except ScoringTimeoutError:
            return "it cannot be checked"
        except ScoringError as error:
            return str(error).removeprefix("ValueError: ")
        except (TypeError, ValueError, RecursionError):
            return "it is not JSON"
        return ""


class OpenEnvServer:
    """A server at a URL, or one that is started here when it is first needed, and again if it has
    ended. All episodes of this process share it."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._url = options.url.rstrip("/")
        self._schemas: Mapping[str, Any] | None = None
        self._lock = threading.Lock()
        self.checks = SchemaChecks()

    async def url(self) -> str:
        """The address; starts the server if necessary. Raises `OpenEnvError` if it cannot be."""
        if self._options.server:
            await asyncio.to_thread(self._start)
        return self._url

    async def schemas(self, url: str) -> Mapping[str, Any]:
        """The schemas of actions, observations and states, asked for once; none if the server has
        none. Raises `OpenEnvError` for anything else."""
        if self._schemas is None:
            self._schemas = await self._asked(url)
        return self._schemas

    def close(self) -> None:
        """Ends a server that was started here."""
        with self._lock:
            self._end()

    async def _asked(self, url: str) -> Mapping[str, Any]:
        limit = aiohttp.ClientTimeout(total=self._options.call_limit_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, auto_decompress=False) as client,
                client.get(
                    f"{url}/schema",
                    allow_redirects=False,
                    headers={"Accept-Encoding": "identity"},
                ) as answer,
            ):
                if answer.status == 404:
                    return {}
                if answer.status != 200:
                    raise OpenEnvError(f"/schema of the server answered {answer.status}")
                text = b""
                async for piece in answer.content.iter_any():
                    text += piece
                    if len(text) > MAX_SCHEMA_BYTES:
                        raise OpenEnvError(f"the schemas have more than {MAX_SCHEMA_BYTES} bytes")
            found = msgspec.json.decode(text)
        except (aiohttp.ClientError, OSError) as error:
            raise _NotYetError(f"{url}: {error}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise OpenEnvError("/schema of the server is not JSON") from error
        return found if isinstance(found, dict) else {}

    def _start(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._end()
            python = machine_policy().interpreters.get("openenv", sys.executable)
            try:
                # In an empty context: it serves all episodes, and must not end with one of them.
                self._process = contextvars.Context().run(
                    subprocess.Popen,
                    [python, "-P", "-c", _BOOT, self._options.server],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in _KEPT if name in os.environ},
                    start_new_session=True,
                )
                assert self._process.stdout is not None
                port = int(self._process.stdout.readline(16))
            except (OSError, ValueError) as error:
                raise OpenEnvError(f"cannot start the server with {python}: {error}") from error
            self._url = f"http://127.0.0.1:{port}"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()


class _NotYetError(Exception):
    """There is no session now, and there may be one later."""


class _EnvironmentSession:
    """One WebSocket: a message out, a message in."""

    def __init__(self, client: aiohttp.ClientSession, connection: Any) -> None:
        self._client = client
        self._connection = connection

    @classmethod
    async def open(cls, url: str, *, most: int) -> _EnvironmentSession:
        """Connects; raises `_NotYetError` if nobody answers, `OpenEnvError` for another answer."""
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_redirect)
        client = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(), trace_configs=[trace], auto_decompress=False
        )
        try:
            close_limit = aiohttp.ClientWSTimeout(ws_close=_FAREWELL_S)
            connection = await client.ws_connect(
                f"{url}/ws", max_msg_size=most, timeout=close_limit
            )
        except aiohttp.WSServerHandshakeError as error:  # any status but 101
            await client.close()
            if error.status == 503:
                raise _NotYetError(f"{url} answered 503") from error
            raise OpenEnvError(f"the server answered {error.status}") from error
        except (aiohttp.ClientError, OSError) as error:
            await client.close()
            raise _NotYetError(f"{url}: {error}") from error
        except BaseException:
            await client.close()
            raise
        return cls(client, connection)

    async def ask(self, kind: str, data: dict[str, Any] | None, limit_s: float) -> dict[str, Any]:
        """Sends a message; returns the next one of the server. Raises `OpenEnvError`."""
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(limit_s):
                await self._connection.send_str(json.dumps(message))
                answer = await self._connection.receive()
        except TimeoutError as error:
            raise OpenEnvError(f"{kind}: no answer within {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise OpenEnvError(f"{kind}: the connection is lost: {error}") from error
        if answer.type != aiohttp.WSMsgType.TEXT:
            how = "the message is too long" if self._connection.close_code == 1009 else "it ended"
            raise OpenEnvError(f"{kind}: the connection is lost: {how}")
        try:
            found = msgspec.json.decode(answer.data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise OpenEnvError(f"{kind}: the answer is not JSON") from error
        if not isinstance(found, dict):
            raise OpenEnvError(f"{kind}: the answer is no message")
        return found

    async def close(self) -> None:
        """Says farewell, and closes the connection."""
        try:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._connection.send_str('{"type": "close"}')
                    await self._connection.close()
        finally:
            await self._client.close()


def options_of(config: TaskConfig) -> OpenEnvOptions:
    """Parses ``task.options``; raises `InputError` that names the option."""
    try:
        options = msgspec.convert(config.options, OpenEnvOptions)
    except msgspec.ValidationError as error:
        raise InputError(f"task.options of openenv: {error}") from error
    if bool(options.url) == bool(options.server):
        raise InputError(
            "task.options of openenv need either url or server",
            hint='for example { server = "my_env.server.app:app" }',
        )
    return options


def modules_of(config: TaskConfig) -> list[str]:
    """Returns the module that a server of the options is in; raises `InputError` for wrong options,
    and for a URL that this machine does not let runs reach."""
    options = options_of(config)
    if options.url:
        machine_policy().require_url(options.url, "task.options.url")
    return [options.server.partition(":")[0]] if options.server else []


async def _refuse_redirect(_session: Any, _context: Any, redirected: Any) -> None:
    """Fails a request whose answer sends it elsewhere: a machine's user allowed this URL only."""
    raise OpenEnvError(f"the server answered {redirected.response.status}")


def _message(text: str, call: ToolCall | None) -> Message:
    if call is None:
        return Message("user", text)
    return Message("tool", text, name=call.name, call=call.identity)


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float):
        raise OpenEnvError(f"the server's {name} is {str(value)[:40]!r}, which is no number")
    try:
        return float(value)
    except OverflowError as error:
        raise OpenEnvError(f"the server's {name} is too large") from error


def _told(answer: dict[str, Any]) -> str:
    data = answer.get("data")
    return str(data.get("message", ""))[:300] if isinstance(data, dict) else "no reason given"


def _code(answer: dict[str, Any]) -> str:
    data = answer.get("data")
    return str(data.get("code", "")) if isinstance(data, dict) else ""
