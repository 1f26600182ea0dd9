"""Event archiver: moves the event streams of processes that are gone into few large objects.

Readers ask each stream for its next segment at every look, and a fleet whose workers come and go
uses a new stream for each start of a worker. The trainer therefore archives a worker's stream once
no heartbeat names it for `ARCHIVE_AFTER_S`: archive first, then the segments are deleted. A reader
that had read a part of the stream continues at that position in the archive.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import get_args

from deltawire.errors import CorruptError, DeltawireError
from deltawire.events import Role
from deltawire.runtime.event_cursor import number_of, segments
from deltawire.runtime.fleet import Fleet
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.event_archive import MAX_ARCHIVE_BYTES, ArchivedSegment, EventArchive
from deltawire.wire.objects import decode_packed, encode_packed

ARCHIVE_AFTER_S = 600.0
EVERY_S = 60.0
MAX_SEGMENTS = 1024
"""Segments in one archive, and thus requests between two looks at other work."""
TARGET_BYTES = MAX_ARCHIVE_BYTES // 4


class EventArchiver(threading.Thread):
    """Archives, from a thread, worker streams that no living process writes.

    The streams of the trainer and of other single processes are few and stay.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        after_s: float = ARCHIVE_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="event-archiver", daemon=True)
        self._bucket = bucket
        self._fleet = Fleet(bucket, silence_s=after_s)
        self._after_s = after_s
        self._clock = clock
        self._gone_at: dict[str, float] = {}
        self._next = 0
        self._closed = threading.Event()

    def run(self) -> None:
        """Archive every `EVERY_S` until `close`."""
        while not self._closed.wait(EVERY_S):
            # Nothing depends on an archive: a failed attempt is repeated in the next round.
            with contextlib.suppress(DeltawireError):
                self.archive()

    def archive(self) -> int:
        """Archive the streams that are due; returns how many. Raises `RetryError`."""
        now = self._clock()
        self._fleet.poll()
        gone = {
            stream
            for stream in self._bucket.list_prefixes(keys.EVENTS)
            if keys.valid_name(stream)
            and stream not in self._fleet.streams
            and not _is_fixed(stream)
        }
        self._gone_at = {stream: self._gone_at.get(stream, now) for stream in gone}
        due = sorted(s for s, since in self._gone_at.items() if now - since >= self._after_s)
        for batch in self._batches(due):
            if self._closed.is_set():
                break
            self._store(batch)
        return len(due)

    def close(self) -> None:
        """End the thread once its last request is answered."""
        self._closed.set()
        if self.is_alive():
            self.join()

    def _batches(self, streams: list[str]) -> Iterator[list[ArchivedSegment]]:
        batch: list[ArchivedSegment] = []
        size = 0
        for stream in streams:
            for segment in self._segments(stream):
                if batch and (
                    len(batch) >= MAX_SEGMENTS or size + len(segment.data) > TARGET_BYTES
                ):
                    yield batch
                    batch, size = [], 0
                batch.append(segment)
                size += len(segment.data)
        if batch:
            yield batch

    def _segments(self, stream: str) -> Iterator[ArchivedSegment]:
        """A stream's segments; a listing finds the first one if retention deleted some."""
        number, listed = 0, False
        while True:
            data = self._read(keys.events(stream, number))
            if data is not None:
                yield ArchivedSegment(stream, number, data)
                number, listed = number + 1, True
            elif not listed and (found := segments(self._bucket, stream)):
                number, listed = number_of(found[0]), True
            else:
                return

    def _read(self, key: str) -> bytes | None:
        try:
            return self._bucket.get(key, limit=TARGET_BYTES)
        except CorruptError:
            return b""  # Too large to be a segment: it is deleted with the others.

    def _store(self, batch: list[ArchivedSegment]) -> None:
        data = encode_packed(EventArchive(segments=batch))
        while not self._bucket.create(keys.archive(self._next), data):
            self._next += 1
        self._next += 1
        for segment in batch:
            self._bucket.delete(keys.events(segment.stream, segment.number))


def _is_fixed(stream: str) -> bool:
    return stream.rpartition("-")[0] in get_args(Role)


def read_archive(bucket: Bucket, number: int) -> list[ArchivedSegment] | None:
    """The segments of one archive, None if it does not exist; none for a damaged one."""
    key = keys.archive(number)
    try:
        data = bucket.get(key, limit=MAX_ARCHIVE_BYTES)
        if data is None:
            return None
        return decode_packed(data, EventArchive, run=bucket.url, key=key).segments
    except CorruptError:
        return []
