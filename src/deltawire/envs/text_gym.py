"""Plays text environments of SkyRL-Gym, and of Gymnasium where observations are texts.

::

    [task]
    environment = "text_gym"
    heldout = 100
    options = { kind = "skyrl_gym", id = "gsm8k" }
    data = { path = "gsm8k.parquet", messages = "prompt" }

Concurrency: an episode is a process, since these environments block, share state, and may hang::

    episode ─▶ a line: start, or the model's text ─▶ process: make, init or reset, step
       └──── a line: messages, reward, end, metadata ◀──┘     killed at the end, or when it is late

The process has a limit on memory and few of this one's environment variables. It is no sandbox:
the packages and ``modules`` must be ones that this machine trusts. A row of ``data`` is what
SkyRL-Gym calls extras; without data, tasks are seeds. ``interpreters`` of
`deltawire.config.machine` may name another Python for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.chat.messages import Message
from deltawire.config import TaskConfig
from deltawire.config.machine import machine_policy
from deltawire.config.own_code import require_code
from deltawire.envs.base import Action, Environment, Task, Turn
from deltawire.envs.dataset import DatasetTasks
from deltawire.envs.own_reward import json_columns
from deltawire.errors import InputError

MAX_MESSAGES = 64
"""The most messages of one observation."""
END_S = 2.0
"""Seconds that killed processes of an episode have to end."""
_SEEDS = 1 << 31
_ROLES = ("system", "user", "assistant", "tool")
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHASHSEED", "LANG", "LC_ALL", "TMPDIR")
_PROGRAM = Path(__file__).with_name("text_gym_process.py")


class TextGymError(Exception):
    """The environment failed; the episode has failed with it."""


class TextGymOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``task.options``: which environment, and its limits."""

    # Without a colon: both packages would import what stands before it.
    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./-]{1,128}\Z")]
    """The name under which the environment is registered."""
    kind: Literal["skyrl_gym", "gymnasium"] = "skyrl_gym"
    modules: Annotated[list[Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]{0,127}\Z")]],
                       Meta(max_length=16)] = []  # fmt: skip
    """Modules that are imported first, since they register the environment."""
    settings: dict[str, Any] = {}
    """``env_config`` of SkyRL-Gym; further arguments of ``gymnasium.make``."""
    prompt: Annotated[str, Meta(max_length=100_000)] = ""
    """A message before the first observation, where tasks are seeds."""
    probes: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] = []
    """Members of the last metadata that are reported with the episode; numbers."""
    solved_at: float = 1.0
    """The reward of an episode that counts as correct in an evaluation."""
    start_limit_s: Annotated[float, Meta(gt=0, le=3600)] = 100.0
    step_limit_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    memory_mib: Annotated[int, Meta(ge=128, le=1 << 20)] = 4096
    message_kib: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    """The longest answer of the environment."""


class TextGymTasks:
    """A `TaskSource` whose tasks are the rows of ``task.data``, or seeds.

    Raises `InputError` for wrong options, for packages and modules that this machine does not
    trust, and for rows as `deltawire.envs.dataset.DatasetTasks` does.

    Example::

        options = {"kind": "gymnasium", "id": "Guess-v0", "modules": ["my_environments"]}
        tasks = TextGymTasks(TaskConfig(environment="text_gym", options=options), seed=0)
    """

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        self._options = options_of(config)
        for module in modules_of(config):
            require_code("task.options", module)
        self._rows = None if config.data is None else DatasetTasks(config, seed=seed)
        if self._rows is None and self._options.kind == "skyrl_gym":
            raise InputError(
                "environments of skyrl_gym need rows",
                hint='set [task.data] with a path and messages = "prompt"',
            )
        self._seed = seed
        self._count = config.heldout
        if self._rows is not None:
            self.epoch = self._rows.epoch

    def draw(self, stream: str, index: int) -> Task:
        """Draws a row or a seed that is not held out."""
        if self._rows is not None:
            return self._rows.draw(stream, index)
        digest = hashlib.blake2b(f"{self._seed} {stream} {index}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") % (_SEEDS - self._count)
        return self._task(self._count + number)

    def heldout(self) -> list[Task]:
        """The rows that are held out, or the first seeds."""
        if self._rows is not None:
            return self._rows.heldout()
        return [self._task(number) for number in range(self._count)]

    def open(self, task: Task) -> TextGymEpisode:
        """Opens a fresh episode; its process starts when it is reset."""
        options = self._options
        asked: dict[str, Any] = {
            "kind": options.kind,
            "id": options.id,
            "modules": options.modules,
            "settings": options.settings,
            "memory_bytes": options.memory_mib << 20,
        }
        if self._rows is None:
            prompt = [{"role": "user", "content": options.prompt}] if options.prompt else []
            return TextGymEpisode(options, {**asked, "seed": task.data, "prompt": prompt})
        said = self._rows.prompt(task)
        messages = [Message("user", said)] if isinstance(said, str) else said
        prompt = [{"role": one.role, "content": one.content} for one in messages]
        return TextGymEpisode(options, {**asked, "prompt": prompt, "row": json_columns(task.data)})

    def _task(self, number: int) -> Task:
        return Task(f"{self._options.id}/{number}", number, self._options.id[:64])


class TextGymEpisode(Environment):
    """One episode, and its process."""

    def __init__(self, options: TextGymOptions, asked: dict[str, Any]) -> None:
        self._options = options
        self._asked = asked
        self._process: asyncio.subprocess.Process | None = None
        self._metadata: Mapping[str, Any] = {}

    async def reset(self) -> Turn:
        """Starts the process and the environment; raises `TextGymError`."""
        python = machine_policy().interpreters.get(self._options.kind, sys.executable)
        self._process = await asyncio.create_subprocess_exec(
            *(python, "-P", str(_PROGRAM)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            start_new_session=True,
            limit=self._options.message_kib << 10,
        )
        return await self._ask(self._asked, self._options.start_limit_s)

    async def step(self, action: Action) -> Turn:
        """Passes the model's text on."""
        return await self._ask({"text": action.text}, self._options.step_limit_s)

    async def probes(self) -> Mapping[str, float]:
        """The numbers of the last metadata that ``probes`` names, as far as it has them: what the
        model does may decide that. Raises `TextGymError` for what is no number."""
        return {
            name: _number(self._metadata[name], f"metadata {name}")
            for name in self._options.probes
            if name in self._metadata
        }

    async def close(self) -> None:
        """Ends the process, and those that it started."""
        process = self._process
        if process is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        finally:
            process._transport.close()  # type: ignore[attr-defined]
        await process.wait()
        # One that was killed with it may take a moment, and must not count as left behind.
        deadline = time.monotonic() + END_S
        while _lives(process.pid) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    def solved(self, total_reward: float) -> bool:
        """Returns whether the reward reaches ``solved_at``."""
        return total_reward >= self._options.solved_at

    async def _ask(self, asked: dict[str, Any], limit_s: float) -> Turn:
        """Asks the process; makes a turn of its answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                self._process.stdin.write(json.dumps(asked).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readuntil(b"\n")
            answer = json.loads(line)
        except TimeoutError as error:
            raise TextGymError(f"no answer within {limit_s:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise TextGymError("the environment's process ended") from error
        except asyncio.LimitOverrunError as error:
            most = self._options.message_kib
            raise TextGymError(f"it said more than {most} KiB at once") from error
        except (ValueError, RecursionError) as error:
            raise TextGymError("its answer is not JSON") from error
        if not isinstance(answer, dict) or "error" in answer:
            told = answer.get("error") if isinstance(answer, dict) else "no answer"
            raise TextGymError(f"the environment raised {str(told)[:300]}")
        if isinstance(metadata := answer.get("metadata"), dict):
            self._metadata = metadata  # An action that is none leaves the last one.
        done, reward = answer.get("done", False), answer.get("reward")
        if not isinstance(done, bool):
            raise TextGymError(f"done is {str(done)[:40]!r}")
        number = 0.0 if reward is None else _number(reward, "reward")
        return Turn(_messages(answer.get("said")), number, done)


def _lives(group: int) -> bool:
    """Returns whether a process of this group is alive, as far as ``/proc`` shows it."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name in brackets: state, parent, group.
            state, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False


def options_of(config: TaskConfig) -> TextGymOptions:
    """Parses ``task.options``; raises `InputError` that names the option."""
    try:
        return msgspec.convert(config.options, TextGymOptions)
    except msgspec.ValidationError as error:
        raise InputError(f"task.options of text_gym: {error}") from error


def modules_of(config: TaskConfig) -> list[str]:
    """Returns what an environment's process imports: the package, and the modules of the options.
    Raises `InputError` for wrong options."""
    options = options_of(config)
    return [options.kind, *options.modules]


def _messages(said: Any) -> list[Message]:
    if not isinstance(said, list) or len(said) > MAX_MESSAGES:
        raise TextGymError("its observation is no list of messages")
    found = []
    for one in said:
        role = one.get("role") if isinstance(one, dict) else None
        content = one.get("content") if isinstance(one, dict) else None
        if role not in _ROLES or not isinstance(content, str):
            raise TextGymError("its observation is no list of messages")
        found.append(Message(role, content))
    return found


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float):
        raise TextGymError(f"its {name} is {str(value)[:40]!r}, which is no number")
    try:
        return float(value)
    except OverflowError as error:
        raise TextGymError(f"its {name} is too large") from error
