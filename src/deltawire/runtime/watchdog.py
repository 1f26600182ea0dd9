"""Who is dead and who hangs: the supervisor's second pair of eyes.

`Vigil` decides, from the pulses it is shown and the time between them; `Watchdog` is the thread
that reads them and kills. The bounds are derived in `deltawire.runtime.supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltawire.errors import DeltawireError
from deltawire.events import Role
from deltawire.runtime.heartbeat import REQUEST_S, impatient, read_pulse
from deltawire.store import Bucket
from deltawire.wire.status import Pulse

WATCH_S = 1.0
FIRST_PULSE_S = 60.0


@dataclass
class Child:
    """One supervised process."""

    name: str
    role: Role
    arguments: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started_at: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    done: bool = False
    killed_for: str = ""
    log_from: int = 0
    """How long its log was when it was last started."""
    achieved: bool = False
    """Whether it was seen to finish a piece of work since it was started."""


class Vigil:
    """What one process's pulse says of it over time; a pure function of what it is shown."""

    def __init__(self, pid: int, *, silence_s: float) -> None:
        self.pid = pid
        self._silence_s = silence_s
        self._beat: int | None = None
        self._silent_s = 0.0

    def observe(self, pulse: Pulse | None, elapsed_s: float) -> str:
        """Why the process must be replaced, empty if it need not be.

        ``elapsed_s`` is the time since the last look, as far as a pulse would have been heard.
        """
        own = pulse if pulse is not None and pulse.pid == self.pid else None
        if own is not None and own.beat != self._beat:
            self._beat, self._silent_s = own.beat, 0.0
        else:
            self._silent_s += elapsed_s
        born = self._beat is not None
        limit = self._silence_s if born else max(self._silence_s, FIRST_PULSE_S)
        if own is not None and own.ended:
            return ""
        if self._silent_s > limit:
            return f"no sign of life for {self._silent_s:.0f} s"
        if own is not None and own.stuck:
            return f"no progress for {own.quiet_s:.0f} s at: {own.doing[:40]!r}"
        return ""


class Watchdog(threading.Thread):
    """Reads the children's pulses and kills those that do not go on.

    ``each_round`` is called in this thread, which may wait for the store, `WATCH_S` apart.
    """

    def __init__(
        self,
        bucket: Bucket,
        children: list[Child],
        silence_s: float,
        each_round: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="watchman", daemon=True)
        self._each_round = each_round
        self.lock = threading.Lock()
        """Held while a child is reaped or killed: a process id means it only until then."""
        self._bucket = impatient(bucket)
        self._children = children
        self._silence_s = silence_s
        self._vigils: dict[str, Vigil] = {}
        self._looked_at: dict[str, float] = {}
        self._closed = threading.Event()

    def run(self) -> None:
        """The thread itself."""
        while not self._closed.wait(WATCH_S):
            for child in list(self._children):
                # Whatever the store says: who watches must go on watching.
                with contextlib.suppress(DeltawireError):
                    self.look(child)
            with contextlib.suppress(DeltawireError):
                self._each_round()

    def look(self, child: Child) -> None:
        """Read one child's pulse, and kill the child for what it says or does not say."""
        process = child.process
        if process is None or child.done or child.killed_for:
            return
        vigil = self._vigils.get(child.name)
        if vigil is None or vigil.pid != process.pid:
            vigil = self._vigils[child.name] = Vigil(process.pid, silence_s=self._silence_s)
        before, now = self._looked_at.get(child.name), time.monotonic()
        self._looked_at[child.name] = now  # A look that fails hears nothing, and counts nothing.
        pulse = read_pulse(self._bucket, child.name)
        if pulse is not None and pulse.pid == process.pid and pulse.achieved:
            child.achieved = True
        elapsed = 0.0 if before is None else min(now - before, 2 * WATCH_S)
        if cause := vigil.observe(pulse, elapsed):
            with self.lock:
                if child.process is process and process.returncode is None:
                    child.killed_for = cause
                    kill_with_its_own(process)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self.is_alive():
            self.join(timeout=2 * REQUEST_S)


def kill_with_its_own(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that is not reaped yet, and whatever it started and left in its group."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended; what it left behind in its group is then killed."""
    if process.returncode is None and hasattr(os, "waitid"):
        # Seen but not reaped: its id, and so its group's, cannot be another's yet.
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        kill_with_its_own(process)
    return process.poll() is not None
