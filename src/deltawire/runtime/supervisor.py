"""Supervisor: starts a run's processes and restarts those that die or hang.

It shares no pipe, socket or memory with them. A launcher (`deltawire.runtime.children`) starts
them, on this machine or elsewhere. The supervisor knows only their process ids, signals them
through the launcher, and learns everything else from the bucket like any other reader.

Concurrency::

    main thread   check: reap, restart after a pause      (never waits for the store)
    watchdog      every `WATCH_S`: read each child's heartbeat; kill silent and stalled children
    children      heartbeats/<name>.json, every `HEARTBEAT_S`, from a thread of their own

The time until a hanging process is killed, while the store answers: let P be `HEARTBEAT_S`, W be
`WATCH_S`, and R the time that the store takes for one request, at most `REQUEST_S`:

- The process is stopped (SIGSTOP), or its interpreter is blocked: its last heartbeat was written
  before that. The watchdog sees that heartbeat at most W + R later, sees no newer one, and kills
  the process ``faults.silence_s`` later. In total at most silence_s + 2 (W + R).
- Its main thread hangs (a deadlock, an endless loop in an environment or an engine): the activity
  that it marked last may take a time A, the next heartbeat after A states that this time has
  passed, and the watchdog reads it at most P + W + 2 R later. In total at most A + P + W + 2 R. A
  is ``faults.stall_s``, and for a long task (`deltawire.runtime.heartbeat`) at most
  ``faults.long_s``.
- Before its first heartbeat, which needs only a running interpreter: `FIRST_HEARTBEAT_S`, or
  silence_s if that is longer. Time in which it waits for a processor does not count.

A killed process is restarted `RESTART_PAUSE_S` later, or later if it dies repeatedly. While the
store does not answer, no process is killed: silence that the watchdog could not have observed does
not count, and heartbeats exclude such times from their main thread's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deltawire.config import FaultsConfig
from deltawire.display import safe_line
from deltawire.errors import (
    DeltawireError,
    FencedError,
    InputError,
    OutOfMemoryError,
    StoppedError,
)
from deltawire.events import Life, Role
from deltawire.private_files import private_folder
from deltawire.runtime.children import Launcher, LocalLauncher
from deltawire.runtime.event_log import EventLog
from deltawire.runtime.heartbeat import impatient
from deltawire.runtime.watchdog import Child, Watchdog
from deltawire.store import Bucket
from deltawire.wire import keys

COMMAND = (sys.executable, "-P", "-m", "deltawire")

MAX_LOG_BYTES = 1 << 20
MAX_WORDS = 500
"""The most characters of a dead child's log in an error."""
FULL_BYTES = 1 << 16
"""With less free space than this, in bytes, an empty log means that the disk is full."""
RESTARTS = 20
"""The supervisor gives up after this many consecutive deaths, each within `HEALTHY_S` and before
any work was finished. Exits because the store did not answer do not count.
"""
HEALTHY_S = 60.0
RESTART_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
SHORTAGES = 2
"""The supervisor gives up when a child has run out of memory so often: the next start would need as
much. The first time may be another program's fault.
"""
UNREACHABLE = 75
"""The exit code of a child that could not reach the store; such a child is restarted without
limit.
"""
STOP_PATIENCE_S = 60.0
FINAL_CODES = frozenset(kind.exit_code for kind in (InputError, FencedError, StoppedError))
"""Exit codes of errors that a restart cannot fix."""


class ChildError(DeltawireError):
    """A process of the run ended with an error that a restart cannot fix."""

    def __init__(self, message: str, code: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = code if code > 0 else 1


class Supervisor:
    """Runs child processes until the trainer has finished; `stop` ends them early and cleanly.

    ``command`` starts a child, followed by the child's arguments; ``launcher`` decides where, by
    default on this machine. `stop` closes it.

    Example::

        supervisor = Supervisor(bucket, Path("logs"))
        supervisor.start()
        supervisor.add("trainer", "trainer", ["trainer", bucket.url, "--supervised"])
        while not supervisor.check():
            time.sleep(0.25)
    """

    def __init__(
        self,
        bucket: Bucket,
        logs: Path,
        *,
        faults: FaultsConfig | None = None,
        command: Sequence[str] = COMMAND,
        launcher: Launcher | None = None,
    ) -> None:
        self.bucket = bucket
        self._logs = logs
        self._command = command
        self._launcher = launcher or LocalLauncher()
        self._children: list[Child] = []
        stream = f"supervisor-{secrets.token_hex(8)}"
        quick = impatient(bucket)
        # The watchdog stores events, because the main thread must not wait for a hanging store.
        self._events = EventLog(
            "supervisor",
            lambda n, data: quick.put(keys.events(stream, n), data),
            every_s=float("inf"),
        )
        silence_s = (faults or FaultsConfig()).silence_s
        self._watchdog = Watchdog(bucket, self._children, silence_s, self._events.flush)

    def start(self) -> None:
        """Records that a session of the run starts, which proves that the bucket is writable."""
        now = self._events.now()
        life = Life(
            process="supervisor", at=now, role="supervisor", what="started", pid=os.getpid()
        )
        self._events.record(life)
        self._events.flush()
        self._watchdog.start()

    def add(self, name: str, role: Role, arguments: Sequence[str]) -> None:
        """Starts a child with these arguments, and restarts it whenever it dies."""
        child = Child(name, role, arguments)
        self._children.append(child)
        self._start(child)

    def run(
        self, name: str, role: Role, arguments: Sequence[str], tick: Callable[[], None]
    ) -> None:
        """Runs one child to its end and calls ``tick`` meanwhile; raises `ChildError` if it
        fails.
        """
        child = Child(name, role, arguments)
        self._children.append(child)
        self._start(child)
        while (code := self._exit_code(child)) is None:
            tick()
        self._children.remove(child)
        if code:
            raise self._error(child, code)

    def check(self) -> bool:
        """Restarts children that died; returns True once the trainer has ended normally.

        Raises `ChildError` if a child cannot be kept running.
        """
        for child in self._children:
            if child.done:
                continue
            if child.process is None:
                if time.monotonic() >= child.retry_at:
                    self._start(child)
                continue
            code = self._exit_code(child)
            if code is None:
                continue
            if code == 0:
                child.done = True
            else:
                self._died(child, code)
        return all(child.done for child in self._children if child.role == "trainer")

    def running(self) -> bool:
        """Returns whether any child is running or will be restarted."""
        return any(not child.done for child in self._children)

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Asks every child to stop and waits; kills those that do not stop, or all if in a
        hurry.
        """
        for child in self._children:
            if child.process is not None and self._exit_code(child) is None:
                child.process.ask_to_stop()
        deadline = time.monotonic() + STOP_PATIENCE_S
        for child in self._children:
            if child.process is None:
                continue
            while self._exit_code(child) is None:
                if time.monotonic() > deadline or hurry():
                    with self._watchdog.lock:
                        child.process.kill()
                time.sleep(0.05)
            child.done = True
        self._watchdog.close()
        self._launcher.close()
        with contextlib.suppress(DeltawireError):
            self._events.flush()

    def _exit_code(self, child: Child) -> int | None:
        """Returns a child's exit code, None while it runs."""
        if child.process is None:
            return 1
        with self._watchdog.lock:
            if child.process.ended():
                return child.process.returncode
        if child.process.memory is not None:
            child.process.memory.read()
        return None

    def _start(self, child: Child) -> None:
        private_folder(self._logs, mode=0o755)
        child.killed_for, child.productive = "", False
        log = self._logs / f"{child.name}.log"
        child.log_from = log.stat().st_size if log.is_file() else 0
        child.process = self._launcher.start(child.name, [*self._command, *child.arguments], log)
        child.starts += 1
        child.started_at = time.monotonic()
        if child.starts > 1:
            self._record(child, "restarted", f"start number {child.starts}")

    def _died(self, child: Child, code: int) -> None:
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        if child.killed_for:
            reason = f"killed: {child.killed_for}"
        elif words := self._last_words(child):
            reason += f": {words}"
        shortage = self._shortage(child, code)
        if shortage is not None:
            reason = f"{reason}: {shortage}" if code < 0 else reason
            child.shortages += 1
        self._record(child, "died", reason)
        child.process = None
        if shortage is not None and child.shortages >= SHORTAGES:
            raise shortage
        lived = time.monotonic() - child.started_at
        if child.productive or lived >= HEALTHY_S:
            child.failures = 0
        if code != UNREACHABLE:
            child.failures += 1
        given_up = child.failures > RESTARTS
        if code in FINAL_CODES or given_up:
            raise self._error(child, code)
        pause = min(RESTART_PAUSE_S * max(child.failures, 1), LONGEST_PAUSE_S)
        child.retry_at = time.monotonic() + pause

    def _shortage(self, child: Child, code: int) -> ChildError | None:
        """Returns the error of a child that ran out of memory, None for another death."""
        own = OutOfMemoryError.exit_code
        if code == own:
            return ChildError(self._last_error(child) or f"{child.name} ran out of memory", own)
        memory = None if child.process is None else child.process.memory
        if code != -signal.SIGKILL or child.killed_for or memory is None:
            return None
        found = memory.why_killed(child.name, child.role)
        return None if found is None else ChildError(found.message, own, hint=found.hint)

    def _last_error(self, child: Child) -> str:
        """Returns the error that a child reported last since it was started, empty if it reported
        none.
        """
        lines = _end_of(self._logs / f"{child.name}.log", child.log_from)
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return errors[-1] if errors else ""

    def _last_words(self, child: Child) -> str:
        """Returns the reported error, or the last line of the log, such as that of a traceback."""
        lines = _end_of(self._logs / f"{child.name}.log", child.log_from)
        return (self._last_error(child) or next(filter(None, reversed(lines)), ""))[:MAX_WORDS]

    def _record(self, child: Child, what: str, detail: str) -> None:
        life = Life(
            process=child.name,
            at=self._events.now(),
            role=child.role,
            what="died" if what == "died" else "restarted",
            detail=safe_line(detail),
        )
        self._events.record(life)

    def _error(self, child: Child, code: int) -> ChildError:
        log = self._logs / f"{child.name}.log"
        if shortage := self._shortage(child, code):
            return shortage
        if error := self._last_error(child):
            return ChildError(error, code)
        if child.killed_for:
            return ChildError(
                f"{child.name} was killed: {child.killed_for}; its log is {log}", code
            )
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        if shutil.disk_usage(self._logs).free < FULL_BYTES:
            reason += f", and there is no space left on the disk of {self._logs}"
            return ChildError(
                f"{child.name} ended with {reason}",
                code,
                hint="free some space; no stored data is lost",
            )
        return ChildError(f"{child.name} ended with {reason}; its log is {log}", code)


def _end_of(log: Path, since: int) -> list[str]:
    """Returns the last lines that were written to a log after position ``since``."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - MAX_LOG_BYTES))
        return file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()
    return []
