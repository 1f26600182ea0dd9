"""Reading a run's events as they come, each once."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from deltawire.errors import CorruptError, DeltawireError, RetryError
from deltawire.events import Event, decode_lines
from deltawire.runtime.event_cursor import Places, follow
from deltawire.store import Bucket

MAX_SEGMENT_BYTES = 64 << 20
LIST_EVERY_S = 3.0


def read_segment(bucket: Bucket, key: str) -> list[Event] | None:
    """The events of a segment, None if it is not there; none of one that is no segment."""
    try:
        data = bucket.get(key, limit=MAX_SEGMENT_BYTES)
    except CorruptError:
        return []
    return None if data is None else decode_lines(data)


class EventTail:
    """Reads each segment of the run's events once, those of one series in order.

    It asks for what is new alone (`deltawire.runtime.event_cursor`). While the store does not
    answer, nothing new comes.
    """

    def __init__(self, bucket: Bucket, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = bucket
        self._places = Places(bucket, names_every_s=LIST_EVERY_S, clock=clock)

    def read(self, *, everything: bool = False) -> list[Event]:
        """Events that have come since the last call. Those of a process that was quiet for long may
        come later (`LONGEST_S` at most), unless ``everything`` asks for them too."""
        fresh: list[Event] = []
        with contextlib.suppress(RetryError):
            for series in self._places.new_names(everything=everything):
                self._places.add(series)
            for place in self._places.due(everything=everything):
                for events in follow(self._places, place, self._segment, everything=everything):
                    fresh += events
        return fresh

    def _segment(self, key: str) -> list[Event] | None:
        return read_segment(self._bucket, key)


class EventFeed(threading.Thread):
    """An `EventTail` with a thread of its own: who looks at a run need not wait for the store.

    ``beside`` is called there too, after each look for events.
    """

    def __init__(
        self, tail: EventTail, *, every_s: float, beside: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name="event-feed", daemon=True)
        self._tail = tail
        self._every_s = every_s
        self._beside = beside
        self._fresh: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.error: DeltawireError | None = None

    def run(self) -> None:
        """The thread itself."""
        while not self._closed.wait(self._every_s):
            try:
                self._fresh.put(self._tail.read())
                self._beside()
            except DeltawireError as error:
                self.error = error
                return

    def take(self) -> list[Event]:
        """What has come since the last call; raises what reading failed with."""
        if self.error is not None:
            raise self.error
        fresh: list[Event] = []
        while not self._fresh.empty():
            fresh += self._fresh.get()
        return fresh

    def close(self) -> None:
        """End the thread, once its last request is answered."""
        self._closed.set()
        if self.is_alive():
            self.join()
