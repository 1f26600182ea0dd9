"""Event log: collects a process's events and stores them in segments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from deltawire.errors import RetryError
from deltawire.events import Activity, Event, Span, encode_lines


class EventLog:
    """Collects a process's events and stores them in segments.

    ``put(number, data)`` stores one segment of JSON lines, in the thread that records the event
    that fills it or that calls `flush`. If it raises `RetryError`, the next flush stores the same
    bytes again before a new segment; other errors pass through.

    Example::

        log = EventLog("trainer", lambda n, data: bucket.put(keys.events("trainer", n), data))
        log.span("train", started)
        log.flush()
    """

    def __init__(
        self,
        process: str,
        put: Callable[[int, bytes], None],
        *,
        every_s: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.process = process
        self.now = clock
        self._put = put
        self._every_s = every_s
        self._pending: list[Event] = []
        self._unanswered = b""
        self._segment = 0
        self._flushed_at = clock()
        self._lock = threading.RLock()

    def record(self, event: Event) -> None:
        """Add an event, and flush if the last flush is ``every_s`` ago."""
        with self._lock:
            self._pending.append(event)
            if self.now() - self._flushed_at >= self._every_s:
                self.flush()

    def span(self, activity: Activity, start: float, end: float | None = None) -> float:
        """Record that ``activity`` ran from ``start`` until ``end`` (now), and return the end.

        A span that continues the last pending one of the same activity is merged into it.
        """
        end = self.now() if end is None else end
        with self._lock:
            last = self._pending[-1] if self._pending else None
            if isinstance(last, Span) and last.activity == activity and start - last.end < 0.005:
                self._pending[-1] = msgspec.structs.replace(last, end=end)
                if end - self._flushed_at >= self._every_s:
                    self.flush()
            elif end > start:
                self.record(Span(process=self.process, activity=activity, start=start, end=end))
        return end

    def flush(self) -> None:
        """Store the pending events as one segment.

        A segment whose put was not answered is stored again first, unchanged: it may exist already,
        and may have been read.
        """
        with self._lock:
            self._flushed_at = self.now()
            while self._unanswered or self._pending:
                if not self._unanswered:
                    self._unanswered = encode_lines(self._pending)
                    self._pending.clear()
                try:
                    self._put(self._segment, self._unanswered)
                except RetryError:
                    return
                self._segment += 1
                self._unanswered = b""
