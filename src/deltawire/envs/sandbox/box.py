"""`Sandbox` runs one command over one folder, from an event loop.

A folder is a value (`Files`): it goes in with the command and comes back with the outcome, and
between two commands only that value exists. So no process, open file or mount outlives a command,
two rollouts cannot interact, and a folder can be stored, copied or graded elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from deltawire.config.machine import Isolation
from deltawire.envs.sandbox.plan import (
    MAX_HEADER_BYTES,
    CommandLimits,
    Files,
    Request,
    Result,
    pack_request,
    valid_path,
)
from deltawire.errors import BugError, InputError, RetryError

__all__ = ["CommandLimits", "Files", "Isolation", "Outcome", "Sandbox", "check_files"]

_GRACE_S = 30.0
"""Time that the launcher may take beyond the command's before it counts as stuck."""
_FAREWELL_S = 5.0
_FIRST_UID = 1_900_000_000
"""The first user id for commands of a worker that is root, far from those of real users."""
_BOOT = (
    "import sys; sys.path.append({!r}); from deltawire.envs.sandbox.launcher import main; main()"
)


@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    ``status`` is its exit code, or minus the signal that ended it; ``cause`` names the limit that
    it exceeded (time, cpu, memory, processes or output), or is empty. ``output`` holds both streams
    in order, cut in the middle if ``printed`` bytes were more than allowed. ``files`` is the folder
    afterwards; ``lost`` counts what was left out of it: links, pipes, invalid names, and what is
    beyond the limits.
    """

    status: int
    cause: str
    output: bytes
    printed: int
    seconds: float
    files: dict[str, bytes]
    lost: int


def check_files(files: Files, limits: CommandLimits) -> None:
    """Raises `InputError` if a folder holds an invalid path, or more than the limits."""
    for path in files:
        if not valid_path(path):
            raise InputError(f"{path[:80]!r} is not a valid path below the workspace")
    size = sum(len(data) for data in files.values())
    if len(files) > limits.files or size > limits.disk_bytes:
        raise InputError(
            f"a workspace of {len(files)} files, {size} bytes",
            hint=f"at most {limits.files} files, {limits.disk_bytes} bytes",
        )


class Sandbox:
    """Runs commands, at most ``at_once`` at a time (four per processor by default).

    ``isolation`` is ``namespaces`` (Linux: no network, and of the machine only its programs are
    visible) or ``process``, which sets limits and isolates nothing. With ``namespaces``, a machine
    that does not support it raises `InputError`, and nothing is run.

    Example::

        outcome = await Sandbox().run("python -m unittest -q", {"test_a.py": b"..."})
        outcome.status, outcome.output, outcome.files
    """

    def __init__(
        self,
        *,
        isolation: Isolation = "namespaces",
        at_once: int | None = None,
        user_namespace: bool | None = None,
    ) -> None:
        self.isolation = isolation
        self._user_namespace = user_namespace
        self._checked = False
        self._at_once = at_once or 4 * (os.cpu_count() or 1)
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._turns = WeakKeyDictionary()
        if isolation == "namespaces" and sys.platform != "linux":
            raise InputError(
                f"no sandbox of namespaces on {sys.platform}",
                hint='use Linux, or set isolation = "process" where you trust what is run',
            )

    async def check(self) -> None:
        """Runs a trial command; raises `InputError` that names what this machine lacks."""
        outcome = await self.run(["/bin/sh", "-c", "echo ready"], {})
        if outcome.output != b"ready\n":
            raise InputError(f"the sandbox does not run a shell: {outcome.output[:200]!r}")

    def check_now(self) -> None:
        """Calls `check` once, from outside an event loop, or from one that may block for a moment;
        a success is remembered."""
        if self._checked:
            return
        with ThreadPoolExecutor(1) as apart:
            apart.submit(asyncio.run, self.check()).result()
        self._checked = True

    async def run(
        self,
        command: Sequence[str] | str,
        files: Files,
        *,
        limits: CommandLimits | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Runs a command (a string is passed to the shell) in a folder of ``files``.

        Cancelling ends the command. Raises `InputError` if this machine cannot isolate it or the
        files are invalid, `RetryError` if it could not be started this time.
        """
        limits = limits or CommandLimits()
        check_files(files, limits)
        words = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        async with self.turns():
            return await self._launch(words, files, limits, dict(environment or {}))

    def turns(self) -> asyncio.Semaphore:
        """Returns the semaphore that each command of this event loop holds while it runs."""
        loop = asyncio.get_running_loop()
        return self._turns.setdefault(loop, asyncio.Semaphore(self._at_once))

    def request(
        self, command: tuple[str, ...], limits: CommandLimits, environment: dict[str, str]
    ) -> Request:
        """The request to the launcher."""
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        apart = self._user_namespace if self._user_namespace is not None else not root
        uid = None
        if root and not apart:
            uid = _FIRST_UID + int.from_bytes(os.urandom(3), "little")
        isolated = self.isolation == "namespaces"
        python = Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()
        fixed = {
            "PATH": "/run/bin:/usr/bin:/bin" if isolated else f"{python.parent}:/usr/bin:/bin",
            "HOME": "/tmp",  # noqa: S108  -- the sandbox's own
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        }
        return Request(
            command=command,
            environment={**fixed, **environment},
            limits=limits,
            isolation=self.isolation,
            user_namespace=apart,
            uid=uid,
            python=str(python),
            prefix=sys.base_prefix,
        )

    async def _launch(
        self,
        command: tuple[str, ...],
        files: Files,
        limits: CommandLimits,
        environment: dict[str, str],
    ) -> Outcome:
        request = self.request(command, limits, environment)
        launcher = await start_launcher()
        try:
            async with asyncio.timeout(limits.wall_s + _GRACE_S):
                return await self._converse(launcher, request, files)
        except TimeoutError as error:
            raise RetryError(f"the sandbox hangs: {shlex.join(command)[:200]}") from error
        finally:
            await _dismiss(launcher)

    async def _converse(
        self, launcher: asyncio.subprocess.Process, request: Request, files: Files
    ) -> Outcome:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        try:
            launcher.stdin.write(pack_request(request, files))
            await launcher.stdin.drain()
            result, output, left = await _answer(launcher.stdout, request.limits)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            said = (await launcher.stderr.read(4096)).decode(errors="replace")
            raise RetryError(f"the sandbox's launcher failed: {said[-500:] or error}") from error
        finally:
            launcher.stdin.close()
        require_started(result)
        return Outcome(
            result.status, result.cause, output, result.printed, result.seconds, left, result.lost
        )


async def start_launcher() -> asyncio.subprocess.Process:
    """Starts the launcher, which waits for a request on its stdin."""
    source = str(Path(__file__).resolve().parents[3])
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-B", "-c", _BOOT.format(source)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )


def require_started(result: Result) -> None:
    """Raises `InputError` for a command that this machine cannot isolate, and `RetryError` for one
    that was not started for another reason."""
    if result.unsupported:
        raise InputError(
            f"this machine gives no sandbox: {result.fault}",
            hint="allow user namespaces (or run as root), or set isolation = "
            '"process" where you trust what is run',
        )
    if result.fault:
        raise RetryError(f"the sandbox did not start: {result.fault}")


async def _dismiss(launcher: asyncio.subprocess.Process) -> None:
    """Waits for the launcher's end. Its stdin is closed by now, which makes it end the command;
    without namespaces, nothing else would."""
    try:
        async with asyncio.timeout(_FAREWELL_S):
            await launcher.wait()
    except TimeoutError:
        launcher.kill()
        await launcher.wait()
    finally:
        if launcher.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                launcher.kill()


async def _answer(
    reader: asyncio.StreamReader, limits: CommandLimits
) -> tuple[Result, bytes, dict[str, bytes]]:
    """Reads and checks the launcher's frame, which contains names that the command chose."""
    import msgspec

    length = int.from_bytes(await reader.readexactly(8), "little")
    if length > MAX_HEADER_BYTES:
        raise BugError(f"the sandbox's launcher sent a header of {length} bytes")
    header = msgspec.json.decode(await reader.readexactly(length))
    output = await reader.readexactly(int(header["output"]))
    left = {}
    for path, size in header["files"]:
        data = await reader.readexactly(int(size))
        left[path] = data
    check_files(left, limits)
    return Result(**header["result"]), output, left
