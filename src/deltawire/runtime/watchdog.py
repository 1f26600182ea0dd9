"""Kills child processes that hang, in a thread of the supervisor.

`deltawire.runtime.liveness` makes the decision; the bounds are derived in
`deltawire.runtime.supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltawire.errors import DeltawireError
from deltawire.events import Role
from deltawire.runtime.children import ChildProcess
from deltawire.runtime.heartbeat import REQUEST_S, impatient, read_heartbeat
from deltawire.runtime.liveness import Liveness
from deltawire.store import Bucket

WATCH_S = 1.0
FIRST_HEARTBEAT_S = 60.0
EXIT_S = 60.0
"""Seconds that a process may take to exit after its last heartbeat stated that it ended."""


@dataclass
class Child:
    """One supervised process."""

    name: str
    role: Role
    arguments: Sequence[str]
    process: ChildProcess | None = None
    starts: int = 0
    started_at: float = 0.0
    failures: int = 0
    shortages: int = 0
    """How often it ran out of memory."""
    retry_at: float = 0.0
    done: bool = False
    killed_for: str = ""
    log_from: int = 0
    """The length of its log at its last start."""
    productive: bool = False
    """True if it finished any work since its last start."""


class Watchdog(threading.Thread):
    """Reads the children's heartbeats and kills those that are silent or stalled, or that do not
    exit although they have ended.

    ``each_round`` is called in this thread, which may wait for the store, `WATCH_S` apart.
    """

    def __init__(
        self,
        bucket: Bucket,
        children: list[Child],
        silence_s: float,
        each_round: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._each_round = each_round
        self.lock = threading.Lock()
        """Held while a child is reaped or killed: its process id is valid only until it is
        reaped.
        """
        self._bucket = impatient(bucket)
        self._children = children
        self._silence_s = silence_s
        self._judges: dict[str, tuple[int, Liveness]] = {}
        self._checked_at: dict[str, float] = {}
        self._used_s: dict[int, float] = {}
        """The processor time of each process without a heartbeat when it was last checked."""
        self._closed = threading.Event()

    def run(self) -> None:
        """Checks all children until `close`."""
        while not self._closed.wait(WATCH_S):
            for child in list(self._children):
                # The watchdog must continue, whatever the store returns.
                with contextlib.suppress(DeltawireError):
                    self.check(child)
            with contextlib.suppress(DeltawireError):
                self._each_round()

    def check(self, child: Child) -> None:
        """Reads one child's heartbeat, and kills the child if it is silent or stalled."""
        process = child.process
        if process is None or child.done or child.killed_for or not process.pid:
            return
        pid, liveness = self._judges.get(child.name, (0, None))
        if liveness is None or pid != process.pid:
            liveness = Liveness(silence_s=self._silence_s, first_s=FIRST_HEARTBEAT_S)
            self._judges[child.name] = (process.pid, liveness)
        before, now = self._checked_at.get(child.name), time.monotonic()
        self._checked_at[child.name] = now  # A check that fails measures no silence.
        heartbeat = read_heartbeat(self._bucket, child.name)
        if heartbeat is not None and heartbeat.pid != process.pid:
            heartbeat = None  # It is from the previous process of that name.
        if heartbeat is not None and heartbeat.finished:
            child.productive = True
        elapsed_s = 0.0 if before is None else min(now - before, 2 * WATCH_S)
        if heartbeat is None and process.memory is not None:
            elapsed_s = self._not_queued(process.pid, elapsed_s)
        state, reason = liveness.observe(heartbeat, elapsed_s), liveness.reason
        if state == "ended" and liveness.silent_s > EXIT_S:
            reason = f"it ended {liveness.silent_s:.0f} s ago and did not exit"
        if reason:
            with self.lock:
                if child.process is process and process.returncode is None:
                    child.killed_for = reason
                    process.kill()

    def _not_queued(self, pid: int, elapsed_s: float) -> float:
        """Return the part of the time in which a process on this machine did not wait for a
        processor. On a busy machine it waits most of the time before its first heartbeat."""
        runnable, used_s = processor_of(pid)
        before, self._used_s[pid] = self._used_s.get(pid, 0.0), used_s
        return min(elapsed_s, used_s - before) if runnable else elapsed_s

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        if self.is_alive():
            self.join(timeout=2 * REQUEST_S)


def processor_of(pid: int) -> tuple[bool, float]:
    """Returns whether the main thread of a process runs or could run, and the processor time of the
    process in seconds; False and 0 if the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return words[0] == "R", (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return False, 0.0
