"""Processes that an episode started and left behind: found by a mark in their environment, killed.

While an episode runs, whatever starts a process in its context (the task, tasks and threads that
it started) hands the episode's mark down in an environment variable; so do that process's own
children, daemons among them. At the episode's end every process that still carries the mark is
killed, and the episode is told. An episode that started none pays nothing.

Works where ``/proc`` shows processes' environments; elsewhere nothing is found. A process that was
forked without running a program, or had its environment emptied, is not found either: a sandbox
must end such ones itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "DELTAWIRE_EPISODE"
_SETTLE_S = 2.0
_PROCESSES = Path("/proc")


@dataclass
class OrphanTracker:
    """The processes of one episode."""

    mark: str = field(default_factory=lambda: secrets.token_hex(12))
    started: int = 0

    def end(self) -> int:
        """Kill what is left; returns how many processes that were."""
        if not self.started:
            return 0
        killed: set[int] = set()
        deadline = time.monotonic() + _SETTLE_S
        while (alive := self._alive()) and time.monotonic() < deadline:
            for process in alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
                killed.add(process)
            time.sleep(0.005)
        return len(killed)

    def _alive(self) -> list[int]:
        wanted = f"{VARIABLE}={self.mark}".encode()
        found = []
        for folder in _PROCESSES.glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # A zombie has no environment any more: whoever started it has it to bury.
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return [process for process in found if process != os.getpid()]


_tracker: contextvars.ContextVar[OrphanTracker | None] = contextvars.ContextVar(
    "orphans", default=None
)
_watching = False


@contextlib.contextmanager
def track_orphans() -> Iterator[OrphanTracker]:
    """Mark every process that is started inside."""
    _watch()
    mine = OrphanTracker()
    token = _tracker.set(mine)
    try:
        yield mine
    finally:
        _tracker.reset(token)


def _watch() -> None:
    global _watching  # noqa: PLW0603  (a hook of the interpreter is there once, and for good)
    if not _watching:
        _watching = True
        sys.addaudithook(_on_event)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("subprocess.Popen", "os.posix_spawn", "os.system"):
        return
    mine = _tracker.get()
    # The process inherits what this one's environment is now, or the one that it was given.
    if mine is None:
        os.environ.pop(VARIABLE, None)
        return
    mine.started += 1
    os.environ[VARIABLE] = mine.mark
    given = {"subprocess.Popen": 3, "os.posix_spawn": 2}.get(event)
    if given is not None and isinstance(arguments[given], dict):
        arguments[given][VARIABLE] = mine.mark
