"""Starts an engine's server for this process, waits for it, and ends it with this process.

The server listens on a socket in a folder that only this user can enter. There is no port to guess
or to race for, and other users cannot make the calls that an engine does not protect by its key,
such as ``/collective_rpc``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltawire.engines.following.engine_client import EngineClient
from deltawire.engines.following.environment import engine_python
from deltawire.errors import InputError, ResyncError
from deltawire.runtime.guard import guarded

START_WITHIN_S = 600.0
STOP_WITHIN_S = 20.0
TAIL_BYTES = 2000
MAX_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class ServedModel:
    """The model files in ``folder`` and the ``run`` whose weights replace theirs, and what a server
    must hold: so many ``slots`` of ``capacity`` tokens, in ``precision``. With ``routes``, answers
    tell their expert choices."""

    folder: Path
    run: str
    slots: int
    capacity: int
    precision: str
    seed: int
    threads: int
    public_key: str = ""
    routes: bool = False


class EngineServer:
    """A server of ``engine``, whose Python package is ``package``, started by `start`. Call
    `wait_until_up` first. The server ends when this process ends, for any reason; it writes to the
    file ``log``.

    An engine's own class puts together its command: of ``python``, of ``settings``, which say how
    it follows the run, and of ``more``, which an environment variable such as
    ``DELTAWIRE_VLLM_ARGS`` adds. Raises `InputError` if there is no such engine.
    """

    def __init__(self, engine: str, package: str, model: ServedModel) -> None:
        self.engine = engine
        self.python = engine_python(package)
        self.settings = json.dumps(
            {"run": model.run, "public_key": model.public_key, "follow": False}
        )
        self.more = shlex.split(os.environ.get(f"DELTAWIRE_{package.upper()}_ARGS", ""))
        self._folder = tempfile.TemporaryDirectory(prefix=f"dw-{package}-")
        self.socket = str(Path(self._folder.name) / "http")
        self.log = Path(self._folder.name) / "log"
        self.calls = EngineClient(self.socket, engine)

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Starts the command, which serves at ``socket``."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                guarded(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    def wait_until_up(self, *, stopping: Callable[[], bool]) -> None:
        """Waits until it serves a version; raises `InputError` with the end of its log if it never
        does."""
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            if (code := self._process.poll()) is not None:
                raise InputError(
                    f"{self.engine} exited with code {code} while starting: {self.tail()}"
                )
            if stopping() or time.monotonic() > deadline:
                raise InputError(f"{self.engine} did not start in time: {self.tail()}")
            try:
                if self.calls.status().version >= 0:
                    return
            except ResyncError:
                pass  # It is not listening yet.
            time.sleep(0.2)

    def tail(self, most: int = TAIL_BYTES) -> str:
        """Returns the end of its log, at most ``most`` bytes."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - most))
            return log.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Ends it and every process it started. If it had already exited, copies its log to this
        process's standard error."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            sys.stderr.write(self.tail(MAX_LOG_BYTES) + "\n")
        self._process.stdin.close()
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()
