"""Event tail: reads each event of a run once, as it arrives."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from deltawire.errors import CorruptError, DeltawireError, RetryError
from deltawire.events import Event, Life, decode_lines
from deltawire.runtime.event_archive import archived_segments, read_archive
from deltawire.runtime.event_cursor import QUIET_S, Cursor, Cursors, follow
from deltawire.runtime.retained import read_retained
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.roles import SUPERVISOR_ROLE

MAX_SEGMENT_BYTES = 64 << 20
LIST_EVERY_S = 3.0
READERS = 64


def read_segment(bucket: Bucket, key: str) -> list[Event] | None:
    """Returns the events of a segment, None if it does not exist; none for an object of another
    kind, or one that its process did not sign in a signed run.
    """
    try:
        data = bucket.get(key, limit=MAX_SEGMENT_BYTES)
    except CorruptError:
        return []  # A view goes without these events; nothing is deleted for it.
    return None if data is None else own_events(keys.stream_of(key) or "", data)


def own_events(stream: str, data: bytes) -> list[Event]:
    """Returns the events in a segment of ``stream`` that its process may record.

    Those are events that name it, of the types that its role writes: a worker's key does not say
    which versions the trainer published. A supervisor records how other processes ended, and
    nothing else of them.
    """
    process = keys.process_of_stream(stream)
    return [event for event in decode_lines(data) if _may_record(event, process, stream)]


def _may_record(event: Event, process: str | None, stream: str) -> bool:
    if process == SUPERVISOR_ROLE:
        return isinstance(event, Life)
    if event.process not in (process, stream):
        return False
    return not event.written_by or process in event.written_by


def events_of(bucket: Bucket, process: str) -> list[Event]:
    """All events that a process of this name has recorded, in any of its lives."""
    events: list[Event] = []
    for stream in bucket.list_prefixes(keys.EVENTS):
        if keys.process_of_stream(stream) == process:
            for key in bucket.list(f"{keys.EVENTS}{stream}/"):
                events += read_segment(bucket, key) or []
    # Segments are archived before they are deleted, so archives are read last.
    for segment in archived_segments(bucket):
        if keys.process_of_stream(segment.stream) == process:
            events += own_events(segment.stream, segment.data)
    return events


class EventTail:
    """Reads each segment of a run's events once, and those of one stream in order.

    Archives come first, from the oldest that was kept, then the new segments of each stream
    (`deltawire.runtime.event_cursor`). While the store does not answer, no events arrive. With
    ``processes`` only the streams of these are read.

    Example::

        tail = EventTail(bucket)
        for event in tail.read():
            print(event.process, event)
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        processes: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._processes = frozenset(processes)
        self._clock = clock
        self._cursors = Cursors(bucket, names_every_s=LIST_EVERY_S, clock=clock)
        self._next_archive = 0
        self._floor_due_at = float("-inf")

    def read(self, *, everything: bool = False) -> list[Event]:
        """Returns the events that arrived since the last call.

        Streams that appeared within the last `LIST_EVERY_S`, and segments after a gap, may come
        with a later call, unless ``everything`` asks for them now.
        """
        return [event for events in self.batches(everything=everything) for event in events]

    def batches(self, *, everything: bool = False) -> Iterator[list[Event]]:
        """Returns the events of `read`, a segment or an archive at a time: a reader of a long run
        need not hold them all. The next call may repeat the last batch of a reader that stopped
        early.
        """
        fill: list[list[Event]] = []
        with contextlib.suppress(RetryError):
            yield from self._archived()
            for stream in filter(self._follows, self._cursors.refresh(everything=everything)):
                self._cursors.add(stream)
            active = self._cursors.active
            ahead = self._read_ahead(active)
            for cursor in active:
                for events in follow(
                    self._cursors,
                    cursor,
                    partial(self._segment, ahead),
                    everything=everything,
                    before_gap=lambda: fill.extend(self._archived()),
                ):
                    yield from fill
                    fill.clear()
                    yield events
            if everything:
                yield from self._archived()
        yield from fill

    def _follows(self, stream: str) -> bool:
        return not self._processes or keys.process_of_stream(stream) in self._processes

    def _archived(self) -> Iterator[list[Event]]:
        if self._clock() >= self._floor_due_at:
            # Archives that were deleted before this reader reached them never appear.
            self._next_archive = max(self._next_archive, read_retained(self._bucket).archives)
            self._floor_due_at = self._clock() + QUIET_S
        while (archive := read_archive(self._bucket, self._next_archive)) is not None:
            fresh: list[Event] = []
            for segment in archive:
                if (
                    keys.valid_name(segment.stream)
                    and self._follows(segment.stream)
                    and segment.number >= self._cursors.position(segment.stream)
                ):
                    fresh += own_events(segment.stream, segment.data)
                    self._cursors.advance(segment.stream, segment.number)
            self._next_archive += 1
            self._floor_due_at = self._clock() + QUIET_S
            yield fresh

    def _read_ahead(self, cursors: list[Cursor]) -> dict[str, Future[list[Event] | None]]:
        """Asks for the next segment of each stream, `READERS` at a time.

        Most streams have none, and a read must not wait for one response after another.
        """
        if len(cursors) < 2 or self._bucket.local:
            return {}
        with ThreadPoolExecutor(READERS, "event-tail") as readers:
            return {
                cursor.key: readers.submit(read_segment, self._bucket, cursor.key)
                for cursor in cursors
                if cursor.next <= keys.MAX_NUMBER
            }

    def _segment(
        self, ahead: dict[str, Future[list[Event] | None]], key: str
    ) -> list[Event] | None:
        found = ahead.pop(key, None)
        return read_segment(self._bucket, key) if found is None else found.result()


class EventFeed(threading.Thread):
    """An `EventTail` in a thread, so that a view need not wait for the store.

    ``each_round`` is called in the thread after each read.
    """

    def __init__(
        self, tail: EventTail, *, every_s: float, each_round: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name="event-feed", daemon=True)
        self._tail = tail
        self._every_s = every_s
        self._each_round = each_round
        self._fresh: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.error: DeltawireError | None = None

    def run(self) -> None:
        """Reads until `close`."""
        while not self._closed.wait(self._every_s):
            try:
                self._fresh.put(self._tail.read())
                self._each_round()
            except DeltawireError as error:
                self.error = error
                return

    def poll(self) -> list[Event]:
        """Returns the events that arrived since the last call; raises the error of a failed
        read.
        """
        if self.error is not None:
            raise self.error
        fresh: list[Event] = []
        while not self._fresh.empty():
            fresh += self._fresh.get()
        return fresh

    def close(self) -> None:
        """Ends the thread once its last request is answered."""
        self._closed.set()
        if self.is_alive():
            self.join()
