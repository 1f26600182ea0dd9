"""Defines child processes as the supervisor sees them, and the launcher that starts them on this
machine.

A launcher decides where a child runs. The supervisor only asks whether it has ended, asks it to
stop, and kills it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from deltawire.runtime.memory import MemoryWatch

ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Environment variables of every child: some datasets sample from sets of strings, and all
processes must draw the same samples.
"""

HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Variables of every child that its own environment may replace. glibc gives a block of this size
or more back to the system when it is freed. Left to itself, it raises the limit to 32 MiB as blocks
are freed; activations of different sizes then leave holes in the heap, and a trainer grows from
batch to batch.
"""


UPSTREAM_KEY = "DELTAWIRE_UPSTREAM_KEY_"
"""Before an upstream's name in capital letters, with ``_`` for ``-``: the variable that holds its
key. No child gets one."""


class ChildProcess(Protocol):
    """A process that a launcher started."""

    @property
    def pid(self) -> int:
        """Its process id on its machine, 0 while it waits to be placed."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None until `ended` has returned True."""
        ...

    @property
    def memory(self) -> MemoryWatch | None:
        """A watch of its memory; None for a process on another machine."""
        ...

    def ended(self) -> bool:
        """Returns whether it has ended; all of its output is then in its log."""
        ...

    def ask_to_stop(self) -> None:
        """Sends it SIGTERM. Does not wait."""
        ...

    def kill(self) -> None:
        """Kills it and every process in its group. Does not wait."""
        ...


class Launcher(Protocol):
    """Starts children; `close` releases what it holds for them, after they have ended."""

    def start(self, name: str, command: Sequence[str], log: Path) -> ChildProcess:
        """Starts a child whose output is appended to ``log``."""
        ...

    def close(self) -> None:
        """Releases everything."""
        ...


class LocalChild:
    """A child process on this machine, in a new session."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        given = {n: v for n, v in os.environ.items() if not n.startswith(UPSTREAM_KEY)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**HEAP, **given, **ENVIRONMENT},
            )
        self._memory = MemoryWatch(self._process.pid)

    @property
    def pid(self) -> int:
        """See `ChildProcess.pid`."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """See `ChildProcess.returncode`."""
        return self._process.returncode

    @property
    def memory(self) -> MemoryWatch:
        """See `ChildProcess.memory`."""
        return self._memory

    def ended(self) -> bool:
        """See `ChildProcess.ended`; the rest of its group is then killed."""
        if self._process.returncode is None and hasattr(os, "waitid"):
            # It has exited but is not reaped, so no other process can have its id or its group's
            # yet.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.kill()
        return self._process.poll() is not None

    def ask_to_stop(self) -> None:
        """See `ChildProcess.ask_to_stop`."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See `ChildProcess.kill`; call it only for a child that is not reaped yet."""
        if not hasattr(os, "killpg"):
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class LocalLauncher:
    """Starts children on this machine."""

    def start(self, name: str, command: Sequence[str], log: Path) -> LocalChild:
        """See `Launcher.start`."""
        del name
        return LocalChild(command, log)

    def close(self) -> None:
        """Does nothing: this launcher holds no resources."""
