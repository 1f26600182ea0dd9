"""Keeps the state of one run up to date while its page is open.

Concurrency::

    watch-events thread                    watch-groups thread            requests' threads
    bucket → EventTail ──┬─▶ RunState ◀── lock ──────────────────────── overview, series, timeline
             Watch ──────┤─▶ newest status ◀─────────────────────────── fleet, problems
                         └─▶ GroupIndex ◀── GroupIndexer ◀── bucket      lists of groups

Events of a long run arrive in batches, so that a page shows what was read so far. A value that is
expensive to compute is computed again only when the events changed and at most a twentieth of the
time goes into it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar, cast

from deltawire.config import RunConfig
from deltawire.dashboard.state import RunState
from deltawire.dashboard.status import RunStatus, Watch
from deltawire.errors import DeltawireError, InputError
from deltawire.events import Event, Parity
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket, without_retries
from deltawire.sync import committed_versions, read_run
from deltawire.watch.group_index import GroupIndex
from deltawire.watch.group_indexer import GroupIndexer
from deltawire.wire.run import Run

EVENTS_EVERY_S = 1.0
STATUS_EVERY_S = 2.0
IDLE_EVERY_S = 10.0
"""The pause between two reads while no page is open."""
IDLE_AFTER_S = 60.0
INDEX_TURN_S = 1.0
INDEX_EVERY_S = 2.0
RETRY_S = 5.0
BATCH_EVENTS = 5000
MAX_VALUES = 64
SHARE = 20
"""A value is computed again after this many times its own duration."""

_T = TypeVar("_T")


class _Value(Generic[_T]):
    def __init__(self, value: _T, revision: int, due: float) -> None:
        self.value, self.revision, self.due = value, revision, due


class RunReader:
    """One run of the page. `start` reads in the background until `close`.

    ``complete`` is true once all events that were there at the start were read, and ``revision``
    counts the batches of events that were read. ``error`` is why
    the bucket cannot be read now, empty if it can. ``bucket`` has no retries: the page shows an
    outage and asks again. ``retrying`` is for reads of whole models.
    """

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.retrying = bucket
        self.bucket = bucket = without_retries(bucket)
        self.run: Run = read_run(self.retrying)
        self.config = _config(self.run, bucket)
        self.index = GroupIndex(index_path(folder, bucket, self.run))
        self.indexer = GroupIndexer(bucket, self.run, self.index)
        self.complete = False
        self.error = ""
        self.status: RunStatus | None = None
        self._state = RunState()
        self.revision = 0
        self._values: dict[Hashable, _Value[object]] = {}
        self._lock = threading.RLock()
        self._tail = EventTail(bucket)
        self._watch = Watch(bucket, retrying=self.retrying)
        self._closed = threading.Event()
        self._asked_at = time.monotonic()
        self._threads = [
            threading.Thread(target=self._read, name="watch-events", daemon=True),
            threading.Thread(target=self._index, name="watch-groups", daemon=True),
        ]

    @property
    def bound(self) -> int | None:
        """The largest staleness that the run's configuration allows."""
        return self.config.train.largest_age if self.config else None

    def start(self) -> None:
        """Reads in the background."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads once their last requests are answered."""
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.index.close()

    def touch(self) -> None:
        """Records that a request used this run now."""
        self._asked_at = time.monotonic()

    def ask(self, name: Hashable, compute: Callable[[RunState], _T]) -> _T:
        """Returns ``compute`` of the state, or its last value while that is fresh enough."""
        with self._lock:
            known = cast("_Value[_T] | None", self._values.get(name))
            fresh = known is not None and (
                known.revision == self.revision or time.monotonic() < known.due
            )
            if known is not None and fresh:
                return known.value
            began = time.monotonic()
            value = compute(self._state)
            ended = time.monotonic()
            if len(self._values) >= MAX_VALUES:
                self._values.pop(next(iter(self._values)))
            self._values[name] = _Value(value, self.revision, ended + SHARE * (ended - began))
            return value

    def with_state(self, compute: Callable[[RunState], _T]) -> _T:
        """Returns ``compute`` of the state, which must be quick."""
        with self._lock:
            return compute(self._state)

    def versions(self) -> list[int]:
        """The committed versions, in order. Only those that are new are listed, since a run may
        have 100,000."""
        known = self.indexer.listed
        if not known:
            return committed_versions(self.bucket)
        return known + committed_versions(self.bucket, newer_than=known[-1])

    def parity_of(self, version: int) -> Parity | None:
        """The measurements of the step that made a version."""
        return self.with_state(lambda state: state.parity.get(version))

    def _read(self) -> None:
        status_due = 0.0
        while not self._closed.is_set():
            try:
                if time.monotonic() >= status_due:
                    self.status = self._watch.poll()
                    status_due = time.monotonic() + STATUS_EVERY_S
                self._read_events()
                self.error = ""
                pause = EVENTS_EVERY_S
            except DeltawireError as error:
                self.error, pause = str(error), RETRY_S
            idle = time.monotonic() - self._asked_at > IDLE_AFTER_S
            self._closed.wait(IDLE_EVERY_S if idle else pause)

    def _read_events(self) -> None:
        fresh: list[Event] = []
        for events in self._tail.batches(everything=not self.complete):
            fresh += events
            if len(fresh) >= BATCH_EVENTS:
                self._add(fresh)
                fresh = []
            if self._closed.is_set():
                return
        self._add(fresh)
        if not self.complete:
            with self._lock:
                self.complete = True
                self._values.clear()

    def _add(self, events: list[Event]) -> None:
        if not events:
            return
        with self._lock:
            self._state.add(events)
            self.revision += 1
        self.index.add_events(events)

    def _index(self) -> None:
        while not self._closed.is_set():
            pause = INDEX_EVERY_S
            try:
                if self.indexer.advance(INDEX_TURN_S, self._closed.is_set):
                    pause = 0.02  # Requests and events go first.
            except DeltawireError:
                pause = RETRY_S
            self._closed.wait(pause)


def _config(run: Run, bucket: Bucket) -> RunConfig | None:
    if not run.config:
        return None
    try:
        return config_of(run, url=bucket.url)
    except InputError:
        return None


def index_path(folder: Path, bucket: Bucket, run: Run) -> Path:
    """Returns where a run's index is kept: named by the run's id and its location, because another
    run may claim the same id."""
    import blake3

    name = blake3.blake3(f"{bucket.url}\n{run.id}".encode()).hexdigest()[:32]
    return folder / f"{name}.sqlite"
