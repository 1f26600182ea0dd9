"""Kills processes that an episode started and did not end.

While an episode runs, every process that is started in its context (the task, and tasks and threads
that it started) inherits the episode's mark in an environment variable; so do that process's own
children, including daemons. At the end of the episode every process that still has the mark is
killed and counted. An episode that started none costs nothing.

Works where ``/proc`` shows the environments of processes; elsewhere nothing is found. A process
that was forked without running a program, or whose environment was emptied, is not found either: a
sandbox must end such processes itself.
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
    """Tracks the processes of one episode."""

    mark: str = field(default_factory=lambda: secrets.token_hex(12))
    started: int = 0

    def end(self) -> int:
        """Kills the processes that are left; returns how many there were."""
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
                # A zombie has no environment; its parent must wait for it.
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return [process for process in found if process != os.getpid()]


_tracker: contextvars.ContextVar[OrphanTracker | None] = contextvars.ContextVar(
    "orphans", default=None
)
_watching = False


@contextlib.contextmanager
def track_orphans() -> Iterator[OrphanTracker]:
    """Marks every process that the body starts."""
    _watch()
    tracker = OrphanTracker()
    token = _tracker.set(tracker)
    try:
        yield tracker
    finally:
        _tracker.reset(token)


def _watch() -> None:
    global _watching  # noqa: PLW0603  (an audit hook of the interpreter cannot be removed)
    if not _watching:
        _watching = True
        sys.addaudithook(_on_event)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("subprocess.Popen", "os.posix_spawn", "os.system"):
        return
    tracker = _tracker.get()
    # The new process inherits this process's current environment, or the one that was passed to it.
    if tracker is None:
        os.environ.pop(VARIABLE, None)
        return
    tracker.started += 1
    os.environ[VARIABLE] = tracker.mark
    given = {"subprocess.Popen": 3, "os.posix_spawn": 2}.get(event)
    if given is not None and isinstance(arguments[given], dict):
        arguments[given][VARIABLE] = tracker.mark
