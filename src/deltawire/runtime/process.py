"""Connects one process to its run: signals, parent, events, lease and heartbeat."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from deltawire.config import RunConfig, with_settings
from deltawire.errors import DeltawireError, FencedError, InputError
from deltawire.events import Life, Role
from deltawire.runtime.event_log import EventLog
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.heartbeat import HEARTBEAT_S, HeartbeatWriter, read_heartbeat
from deltawire.runtime.lease import Lease
from deltawire.runtime.liveness import Liveness
from deltawire.runtime.needs import check_needs, config_of
from deltawire.store import Bucket, without_retries
from deltawire.sync.chain.objects import find_run
from deltawire.wire import keys
from deltawire.wire.run import Run

RUN_PATIENCE_S = 300.0
"""Seconds that a reader waits for a run, and for its version 0, to appear."""


class StopAskedError(BaseException):
    """The process was asked to stop during work of which nothing is kept.

    No `Exception`: the work may be in a library that catches every error.
    """


class Process:
    """One process of a run.

    The process should stop on SIGTERM or SIGINT and, if ``supervised``, once its supervisor is
    gone. The supervisor knows it by process id: its own, or ``pid`` if the supervisor started its
    parent. ``bucket`` repeats requests that the store did not answer, as `open_bucket` returns it;
    events and heartbeats do not wait for that.

    Example::

        process = Process(bucket, "w0", "worker", supervised=False)
        with process.registered():
            while not process.stopping:
                process.heartbeat.progress("sample")
    """

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        role: Role,
        *,
        supervised: bool,
        pid: int | None = None,
    ) -> None:
        self.bucket = bucket
        self.name = name
        self.role: Role = role
        self.supervised = supervised
        self.nonce = secrets.token_hex(8)
        self.host = socket.gethostname()[:64]
        self.started_at = time.time()
        self.heartbeat = HeartbeatWriter(
            bucket,
            name,
            role,
            nonce=self.nonce,
            host=self.host,
            supervised=supervised,
            pid=pid,
        )
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._interruptible = False
        stream = f"{name}-{self.nonce}"
        once = without_retries(bucket)
        self.events = EventLog(name, lambda n, data: once.put(keys.events(stream, n), data))

    def in_line(self, bucket: Bucket) -> Process:
        """Returns this process as one of a line of its run, at ``bucket``: the same name, with a
        lease, a heartbeat and events there. It stops with this one."""
        other = Process(bucket, self.name, self.role, supervised=self.supervised)
        other._stop = self._stop
        return other

    def open_run(self) -> tuple[Run, RunConfig]:
        """Waits for the run in the process's bucket, at most `RUN_PATIENCE_S`, and returns it with
        its configuration, whose limits the heartbeat takes. Raises as the function `open_run`."""
        found = open_run(
            self.bucket, role=self.role, wait_s=RUN_PATIENCE_S, stopping=self.is_stopping
        )
        self.heartbeat.faults = found[1].faults
        return found

    @property
    def lease(self) -> Lease:
        """The lease of the process's name."""
        return self.heartbeat.lease

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Turns SIGTERM and SIGINT into requests to stop while the body runs, in the main thread.

        A supervised process keeps these handlers until it ends: its supervisor would take an exit
        by a signal for a failure.
        """
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                # None stands for a handler that Python did not set and cannot set again.
                if handler is not None and not self.supervised:
                    signal.signal(number, handler)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Is both `handling_signals` and `registered` while the body runs."""
        with self.handling_signals(), self.registered():
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stop.set()
        if self._interruptible:
            self._interruptible = False  # A second signal must not interrupt the cleaning up.
            raise StopAskedError

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raises `StopAskedError` in the body, in the main thread, once a signal asks to stop: for
        work that may take a minute and of which nothing is kept, such as loading a model.
        """
        try:
            self._interruptible = True  # First: a signal after the test would be lost otherwise.
            if self.stopping:
                raise StopAskedError
            yield
        finally:
            self._interruptible = False

    def is_stopping(self) -> bool:
        """`stopping` as a function, for callers that poll it."""
        return self.stopping

    @property
    def stopping(self) -> bool:
        """Returns whether to stop as soon as nothing is left unfinished."""
        if self.supervised and os.getppid() != self._parent:
            self._stop.set()
        return self._stop.is_set()

    def stop(self) -> None:
        """Asks the process to stop."""
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Sleeps, at most until a signal arrives."""
        self._stop.wait(seconds)

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Holds the process's name and writes heartbeats while the body runs.

        Raises `FencedError` if an unsupervised worker's name belongs to a process that is alive;
        any other process takes over its name. Raises `InputError` before that if this build lacks
        a feature that the run needs: it would end the process that has the name, and do nothing.
        """
        run = None
        with contextlib.suppress(DeltawireError):  # Its reader says why it is damaged.
            run = find_run(self.bucket)
        if run is not None:
            check_needs(run, self.role, url=self.bucket.url)
        if self.role == "worker" and not self.supervised:
            self.refuse_live_namesake()
        self.heartbeat.start()
        try:
            yield
        finally:
            self.heartbeat.close()

    def refuse_live_namesake(self) -> None:
        """Raises `FencedError` if a process of this name is alive; takes two heartbeats at most."""
        if beats(self.bucket, self.name, wait=self.wait):
            worker = self.role == "worker"
            raise FencedError(
                f"a {self.role} named {self.name} is alive in this run",
                hint="give this worker another --id" if worker else "stop it first",
                run=self.bucket.url,
            )

    def record_life(self, what: Any, detail: str = "") -> None:
        """Records that the process started or stopped, and flushes the events."""
        self.events.record(
            Life(
                process=self.name,
                at=self.events.now(),
                role=self.role,
                what=what,
                supervised=self.supervised,
                pid=os.getpid(),
                host=self.host,
                detail=detail,
            )
        )
        self.events.flush()


def beats(bucket: Bucket, name: str, *, wait: Callable[[float], Any] = time.sleep) -> bool:
    """Returns whether a process of this name is alive in a run: whether its heartbeat changes
    within 2.5 of its periods. Only one that has not ended takes that time."""
    liveness = Liveness(silence_s=HEARTBEAT_S)
    before = read_heartbeat(bucket, name)
    if before is None or liveness.observe(before, 0.0) == "ended":
        return False
    wait(2.5 * HEARTBEAT_S)
    after = read_heartbeat(bucket, name)
    return liveness.observe(after, 2.5 * HEARTBEAT_S) in ("alive", "stalled")


def open_run(
    bucket: Bucket,
    *,
    role: str = "",
    wait_s: float = 0.0,
    stopping: Callable[[], bool] = lambda: False,
    weights_only: Callable[[Bucket, Run], RunConfig] | None = None,
) -> tuple[Run, RunConfig]:
    """Returns the run in a bucket and its configuration, with the settings that its trainer
    changed.

    Waits up to ``wait_s`` for the run to appear; raises `InputError` if there is none, and if it
    needs a feature of a process of ``role`` that this build does not have.
    ``weights_only`` gives the configuration of a run that carries none; without it such a run is
    refused.
    """
    deadline = time.monotonic() + wait_s
    while (run := find_run(bucket)) is None:
        if time.monotonic() >= deadline or stopping():
            raise InputError(
                "there is no run here",
                hint="start one with: deltawire run CONFIG.toml",
                run=bucket.url,
            )
        time.sleep(0.2)
    if weights_only is not None and not run.config:
        return run, weights_only(bucket, run)
    config = config_of(run, url=bucket.url, role=role)
    status = known_trainer(bucket)
    settings = {} if status is None else status.settings
    return run, with_settings(config, settings, source=f"{bucket.url}/{keys.TRAINER}")
