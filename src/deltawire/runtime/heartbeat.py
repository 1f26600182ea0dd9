"""Heartbeat writer: shows that a process is alive, and that its main thread makes progress.

Concurrency::

    main thread        progress ─▶ one tuple, replaced as a whole
                                       │ read
    heartbeat thread   ◀───────────────┘ ─▶ every `HEARTBEAT_S`: check the lease, write
                                            heartbeats/<name>.json

Heartbeats from a thread prove little by themselves, because the thread continues while the main
thread hangs. The main thread therefore marks its progress, and the heartbeat states how long ago
that was and how long the current activity may take. An activity that may take long is announced
with `HeartbeatWriter.long_task` and limited to `SLOWDOWN` times the longest one of its kind so far,
within ``faults.stall_s`` and ``faults.long_s``; the first of its kind is limited by the latter.
Time in which the store did not answer or refused requests because there were too many, or in which
the whole process stood still, does not count against the main thread. The heartbeat's own requests
go first, or a process that loads a version from a store that throttles would look silent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

import msgspec

from deltawire.builds import build_name
from deltawire.config import FaultsConfig
from deltawire.errors import CorruptError, DeltawireError, RetryError
from deltawire.events import Role
from deltawire.runtime.lease import Lease
from deltawire.runtime.signed_bucket import SignedBucket
from deltawire.store import Bucket, open_bare_bucket, traffic, without_retries
from deltawire.store.lanes import in_lane
from deltawire.store.request_limit import refusals_of, refused_ago_s
from deltawire.store.retrying import RetryingBucket
from deltawire.wire import keys
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.status import (
    MAX_ALARM,
    MAX_STATUS_BYTES,
    Heartbeat,
    StoreTraffic,
    WorkerStatus,
)

HEARTBEAT_S = 2.0
SLOWDOWN = 20.0
REQUEST_S = 5.0
"""The time limit of the heartbeat thread's requests, in seconds. Each is tried twice, for which
``faults.silence_s`` must leave time: a hanging request is not a hanging process.
"""
THROTTLED_S = 150.0
"""For so long after a refusal the main thread may wait for the store: longer than the longest pause
between two attempts."""


@dataclass(frozen=True)
class Progress:
    """The main thread's latest sign of progress; ``at`` is on the monotonic clock."""

    at: float
    doing: str
    allowed_s: float


class HeartbeatWriter:
    """Writes the heartbeats of one process from a thread, and holds the lease of its name.

    Until `start`, progress is recorded nowhere and the lease is not held. ``worker`` supplies the
    part of the heartbeat that only workers have, ``alarm`` what could not be read. A process whose
    store refuses requests says so there, and for how long.
    """

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        role: Role,
        *,
        nonce: str,
        host: str,
        supervised: bool,
        pid: int | None = None,
    ) -> None:
        self.faults = FaultsConfig()
        self.lease = Lease(bucket, name, nonce)
        self.worker: Callable[[], WorkerStatus | None] = lambda: None
        self.alarm: Callable[[], str] = lambda: ""
        self.predecessor: Heartbeat | None = None
        """The last heartbeat of the process that had the name before, once started."""
        self._bucket = bucket
        self._name = name
        self._role = role
        self._nonce = nonce
        self._host = host
        self._supervised = supervised
        self._pid = pid or os.getpid()
        self._started_at = time.time()
        self._progress = Progress(time.monotonic(), "start", self.faults.long_s)
        self._longest: dict[str, float] = {}
        self._excused_at = time.monotonic()
        self._number = 0
        self._finished = 0
        self._error: DeltawireError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Takes the name from its previous holder, and writes heartbeats from now on."""
        before = read_heartbeat(self._bucket, self._name)
        before = before or read_tombstone(self._bucket, self._name)
        self.predecessor = before
        if before is not None and before.worker is not None:
            starting = msgspec.structs.replace(before.worker, phase="starting", attested=False)
            self.worker = lambda: starting  # Until the worker has more to report.
        self.lease.acquire(before.lease + 1 if before else 0)
        self._write(self._bucket, ended=False)
        self._bucket = impatient(self._bucket)
        self._thread.start()

    def progress(self, doing: str) -> None:
        """Marks progress of the main thread; raises `FencedError` once the process is replaced."""
        self._progress = Progress(time.monotonic(), doing, self.faults.stall_s)
        if error := self.lease.error or self._error:
            raise error

    @contextlib.contextmanager
    def long_task(self, doing: str) -> Iterator[None]:
        """Allows the body `SLOWDOWN` times as long as its kind has taken so far."""
        self.progress(doing)
        began = time.monotonic()
        longest = self._longest.get(doing)
        allowed = self.faults.long_s if longest is None else SLOWDOWN * longest
        allowed = min(max(allowed, self.faults.stall_s), self.faults.long_s)
        self._progress = Progress(began, doing, allowed)
        yield
        took = time.monotonic() - began
        self._longest[doing] = max(took, longest or 0.0)
        self.progress(doing)

    def count_finished(self) -> None:
        """Counts a piece of work that is finished and stored; the supervisor then keeps restarting
        this process.
        """
        self._finished += 1

    def close(self) -> None:
        """Writes the last heartbeat, which states that the process ended normally, and stops."""
        if not self.lease.held:
            return
        self._closed.set()
        self._thread.join(timeout=2 * REQUEST_S)
        with contextlib.suppress(DeltawireError):
            self.lease.confirm()
            self._write(RetryingBucket(self._bucket), ended=True)

    def _quiet_s(self) -> float:
        return time.monotonic() - max(self._progress.at, self._excused_at)

    def _run(self) -> None:
        with in_lane("first"):
            self._beat()

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            if not self.lease.fresh or refused_ago_s(self._bucket.url) < THROTTLED_S:
                self._excused_at = time.monotonic()
            try:
                self.lease.check(self._bucket)
                if self.lease.error is not None:
                    return
                self._write(self._bucket, ended=False)
            except RetryError:
                self._excused_at = time.monotonic()
            except DeltawireError as error:
                self._error = error
                return

    def _write(self, bucket: Bucket, *, ended: bool) -> None:
        progress = self._progress
        heartbeat = Heartbeat(
            process=self._name,
            role=self._role,
            nonce=self._nonce,
            lease=self.lease.number,
            supervised=self._supervised,
            host=self._host,
            pid=self._pid,
            started_at=self._started_at,
            at=time.time(),
            number=self._number,
            doing=progress.doing,
            quiet_s=max(0.0, self._quiet_s()),
            allowed_s=progress.allowed_s,
            ended=ended,
            finished=self._finished,
            worker=self.worker(),
            alarm=(self.alarm() or refusals_of(self._bucket.url))[:MAX_ALARM],
            build=build_name(),
            traffic=store_traffic(),
        )
        bucket.put(keys.heartbeat(self._name), encode_json(heartbeat))
        self._number += 1


def store_traffic() -> StoreTraffic:
    """Returns what this process has asked of its stores."""
    return StoreTraffic(**asdict(traffic()))


def check_heartbeat(bucket: Bucket, key: str, process: str) -> Heartbeat | None:
    """Returns the heartbeat at ``key``, None if there is none; raises `CorruptError` for a damaged
    one, and for one of another process than ``process``.
    """
    data = bucket.get(key, limit=MAX_STATUS_BYTES)
    if data is None:
        return None
    heartbeat = decode_json(data, Heartbeat, run=bucket.url, key=key)
    if heartbeat.process != process:
        raise CorruptError("a heartbeat of another process", run=bucket.url, key=key)
    return heartbeat


def read_heartbeat(bucket: Bucket, process: str) -> Heartbeat | None:
    """Returns a process's heartbeat, None if there is none that can be read."""
    try:
        return check_heartbeat(bucket, keys.heartbeat(process), process)
    except CorruptError:
        return None  # No sign of life yet: one answer decides nothing (see `Liveness`).


def read_tombstone(bucket: Bucket, process: str) -> Heartbeat | None:
    """Returns the last heartbeat of a process that is gone, None if there is none that can be
    read.
    """
    try:
        return check_heartbeat(bucket, keys.tombstone(process), process)
    except CorruptError:
        return None  # The lease is then the lowest free one, which is created, never replaced.


def impatient(bucket: Bucket) -> Bucket:
    """Returns the same bucket with short timeouts and one attempt an operation: a hanging request
    must not last longer than the outage.
    """
    if isinstance(bucket, SignedBucket):
        return bucket.with_inner(impatient(bucket.inner))
    if bucket.local:
        return without_retries(bucket)
    return open_bare_bucket(
        bucket.url,
        retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=REQUEST_S)},
        client_options={"timeout": timedelta(seconds=REQUEST_S)},
    )
