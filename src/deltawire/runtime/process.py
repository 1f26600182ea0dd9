"""What every process of a run does alike: signals, its parent, its events, its bucket."""

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

from deltawire.config import RunConfig, run_config
from deltawire.errors import InputError
from deltawire.events import EventLog, Life, Role
from deltawire.runtime.heartbeat import Heart
from deltawire.store import Bucket
from deltawire.sync.chain.objects import read_run
from deltawire.wire import keys
from deltawire.wire.run import Run


class Process:
    """One process of a run: its name, its event log, its pulse, and whether it should stop.

    It should stop on SIGTERM or SIGINT, and, when ``supervised``, once its supervisor is gone.
    Nothing connects it to that but the process id.
    """

    def __init__(self, bucket: Bucket, name: str, role: Role, *, supervised: bool) -> None:
        self.bucket = bucket
        self.name = name
        self.role: Role = role
        self.supervised = supervised
        self.nonce = secrets.token_hex(8)
        self.host = socket.gethostname()[:64]
        self.started_at = time.time()
        self.heart = Heart(
            bucket, name, role, nonce=self.nonce, host=self.host, supervised=supervised
        )
        self._parent = os.getppid()
        self._stop = threading.Event()
        series = f"{name}-{self.nonce}"
        self.events = EventLog(name, lambda n, data: bucket.put(keys.events(series, n), data))

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as a wish to stop. Only for a process's main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stop.set()

    def is_stopping(self) -> bool:
        """`stopping`, as a function to hand on."""
        return self.stopping

    @property
    def stopping(self) -> bool:
        """Whether to stop as soon as nothing is left half done."""
        if self.supervised and os.getppid() != self._parent:
            self._stop.set()
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the process to stop."""
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until a signal."""
        self._stop.wait(seconds)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Hold the process's name, and show its pulse, for as long as this lasts."""
        self.heart.begin()
        try:
            yield
        finally:
            self.heart.close()

    def tell(self, what: Any, detail: str = "") -> None:
        """Record that the process started or stopped, and flush."""
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


def open_run(
    bucket: Bucket, *, wait_s: float = 0.0, stopping: Callable[[], bool] = lambda: False
) -> tuple[Run, RunConfig]:
    """The run in a bucket and its configuration, waited for; raises `InputError` if there is
    none."""
    deadline = time.monotonic() + wait_s
    while (run := read_run(bucket)) is None:
        if time.monotonic() >= deadline or stopping():
            raise InputError(
                "there is no run here",
                hint="start one with: deltawire run CONFIG.toml",
                run=bucket.url,
            )
        time.sleep(0.2)
    return run, run_config(run.config, url=bucket.url)


RUN_PATIENCE_S = 300.0
"""How long a reader waits for a run, and for its version 0, to appear."""
