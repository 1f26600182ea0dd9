"""A process's pulse: that it lives, that its work goes on, and that it still is the one.

Who waits for whom::

    main thread   mark ─▶ one tuple, replaced whole
                              │ read
    pulse thread  ◀───────────┘ ─▶ every `PULSE_S`: read pulses/<name>.json, replaced? put it anew

A thread that beats proves little: it goes on beating beside a main thread that hangs. So the main
thread marks its progress, and the pulse states how long ago that was and how long what it does may
take. What may take long says so (`taking`), and is held to what it took before: `SLOWER` times the
slowest of its kind, within ``faults.stall_s`` and ``faults.long_s``; the first of a kind to the
latter. Time in which the store did not answer, or in which this whole process stood still, is not
held against the main thread.

Each process creates the next tenure of its name. One that was stopped, replaced, and wakes up
again finds a tenure above its own: `confirm`, called before every write that another process could
be harmed by, and `mark` then raise `FencedError`, and it ends. `confirm` takes the pulse thread's
last look for good for `CONFIRMED_S` and reads anew after that, so a process that was stopped for
longer reads before it writes. Tenures are objects of their own, created and never written again:
a pulse that was on its way when its process was stopped may come to lie over its successor's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from deltawire.config import FaultsConfig
from deltawire.errors import CorruptError, DeltawireError, FencedError, RetryError
from deltawire.events import Role
from deltawire.store import Bucket, open_bucket
from deltawire.sync.chain.objects import with_retries
from deltawire.wire import keys
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.status import MAX_STATUS_BYTES, Pulse

PULSE_S = 2.0
CONFIRMED_S = 3 * PULSE_S
SLOWER = 20.0
REQUEST_S = 5.0
"""How long a pulse's request may take. It is tried twice, and ``faults.silence_s`` must leave time
for that: a request that hangs in a network is not a process that hangs."""


@dataclass(frozen=True)
class Mark:
    """The main thread's latest sign of progress; ``at`` on the monotonic clock."""

    at: float
    doing: str
    allowed_s: float


class Heart:
    """Marks, tenure and the thread that tells of them, for one process.

    Until `begin`, marks go nowhere and `confirm` finds nothing wrong.
    """

    def __init__(
        self, bucket: Bucket, name: str, role: Role, *, nonce: str, host: str, supervised: bool
    ) -> None:
        self.faults = FaultsConfig()
        self.tenure = 0
        self._bucket = bucket
        self._name = name
        self._role = role
        self._nonce = nonce
        self._host = host
        self._supervised = supervised
        self._started_at = time.time()
        self._mark = Mark(time.monotonic(), "start", self.faults.long_s)
        self._slowest: dict[str, float] = {}
        self._excused_at = time.monotonic()
        self._confirmed_at = time.monotonic()
        self._beaten = 0
        self._achieved = 0
        self._error: DeltawireError | None = None
        self._began = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def begin(self) -> None:
        """Take the name over from whoever had it, and beat from now on."""
        before = with_retries(self._read)
        self.tenure = before.tenure + 1 if before else 0
        while not with_retries(self._claim):
            self.tenure += 1
        self._bucket = impatient(self._bucket)
        with_retries(lambda: self._put(ended=False))
        self._confirmed_at = time.monotonic()
        self._began = True
        self._thread.start()

    def _claim(self) -> bool:
        """Whether the tenure is this process's own now."""
        key, mine = keys.tenure(self._name, self.tenure), self._nonce.encode()
        return self._bucket.create(key, mine) or self._bucket.get(key, limit=64) == mine

    def mark(self, doing: str) -> None:
        """The main thread makes progress; raises `FencedError` once it has been replaced."""
        self._mark = Mark(time.monotonic(), doing, self.faults.stall_s)
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def taking(self, doing: str) -> Iterator[None]:
        """What is done inside may take as long as its kind took before, times `SLOWER`."""
        self.mark(doing)
        began = time.monotonic()
        slowest = self._slowest.get(doing)
        allowed = self.faults.long_s if slowest is None else SLOWER * slowest
        allowed = min(max(allowed, self.faults.stall_s), self.faults.long_s)
        self._mark = Mark(began, doing, allowed)
        yield
        took = time.monotonic() - began
        self._slowest[doing] = max(took, slowest or 0.0)
        self.mark(doing)

    def achieve(self) -> None:
        """A piece of work is finished and stored: who restarts this process may go on doing so."""
        self._achieved += 1

    def confirm(self, *, anew: bool = False) -> bool:
        """Raise `FencedError` if another process has taken this one's name, `RetryError` if that
        cannot be told just now; False if nobody holds names here. ``anew`` looks in any case."""
        if self._began and (anew or time.monotonic() - self._confirmed_at > CONFIRMED_S):
            self._look()
        if self._error is not None:
            raise self._error
        return self._began

    @property
    def stuck(self) -> bool:
        """Whether the main thread marked no progress for longer than what it does may take."""
        return self._began and self._quiet_s() > self._mark.allowed_s

    def close(self) -> None:
        """Say that the process ends, and stop."""
        if not self._began:
            return
        self._closed.set()
        self._thread.join(timeout=2 * REQUEST_S)
        with contextlib.suppress(DeltawireError):
            self.confirm()
            self._put(ended=True)

    def _quiet_s(self) -> float:
        return time.monotonic() - max(self._mark.at, self._excused_at)

    def _run(self) -> None:
        while not self._closed.wait(PULSE_S):
            if time.monotonic() - self._confirmed_at > CONFIRMED_S:
                self._excused_at = time.monotonic()
            try:
                self._look()
                if self._error is not None:
                    return
                self._put(ended=False)
            except RetryError:
                self._excused_at = time.monotonic()
            except DeltawireError as error:
                self._error = error
                return

    def _look(self) -> None:
        key = keys.tenure(self._name, self.tenure + 1)
        if self._bucket.exists(key):
            self._error = FencedError(
                f"another process is {self._name} now",
                hint="this one was taken for dead and replaced; it stops",
                run=self._bucket.url,
                key=key,
            )
        self._confirmed_at = time.monotonic()

    def _read(self) -> Pulse | None:
        return read_pulse(self._bucket, self._name)

    def _put(self, *, ended: bool) -> None:
        mark = self._mark
        pulse = Pulse(
            process=self._name,
            role=self._role,
            nonce=self._nonce,
            tenure=self.tenure,
            supervised=self._supervised,
            host=self._host,
            pid=os.getpid(),
            started_at=self._started_at,
            at=time.time(),
            beat=self._beaten,
            doing=mark.doing,
            quiet_s=max(0.0, self._quiet_s()),
            allowed_s=mark.allowed_s,
            ended=ended,
            achieved=self._achieved,
        )
        self._bucket.put(keys.pulse(self._name), encode_json(pulse))
        self._beaten += 1


def read_pulse(bucket: Bucket, process: str) -> Pulse | None:
    """A process's pulse, None if it has none that can be read."""
    key = keys.pulse(process)
    try:
        data = bucket.get(key, limit=MAX_STATUS_BYTES)
        pulse = None if data is None else decode_json(data, Pulse, run=bucket.url, key=key)
    except CorruptError:
        return None
    return pulse if pulse is not None and pulse.process == process else None


def read_pulses(bucket: Bucket) -> list[Pulse]:
    """Every pulse that can be read, by name."""
    names = [name for key in bucket.list(keys.PULSES) if (name := keys.process_of(key))]
    return [pulse for name in names if (pulse := read_pulse(bucket, name)) is not None]


def impatient(bucket: Bucket) -> Bucket:
    """The same bucket, asked for no longer than a pulse can wait: a request that hangs must not
    outlive the outage that hung it."""
    if bucket.local:
        return bucket
    return open_bucket(
        bucket.url,
        retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=REQUEST_S)},
        client_options={"timeout": timedelta(seconds=REQUEST_S)},
    )
