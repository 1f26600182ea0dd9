"""Event archiver: moves old segments of event streams into few large objects.

Readers request the next segment of each stream at every read, each start of a worker begins a new
stream, and a process that lives for days writes a segment a second. The trainer therefore archives
two kinds of segments: whole streams of workers that no heartbeat has named for `ARCHIVE_AFTER_S`,
and, once there are `COMPACT_SEGMENTS` of them, the segments of a living stream that are older than
that. The archive is stored before the segments are deleted. A reader that has read part of a stream
continues at that position in the archive. A segment that cannot be read is neither archived nor
deleted, nor is what follows it in its stream: it is the archiver's ``alarm``, and the next round
asks again.

Archives may be deleted by age; before that, ``retained.json`` states the first number that is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, takewhile
from typing import get_args

from deltawire.errors import CorruptError, DeltawireError, InputError, UnreadableError
from deltawire.events import Role
from deltawire.runtime.event_cursor import number_of, segments
from deltawire.runtime.fleet import Fleet
from deltawire.runtime.retained import RetainedFile, read_retained
from deltawire.runtime.signed_bucket import signing
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import require_agreed, require_evidence
from deltawire.wire import keys
from deltawire.wire.event_archive import MAX_ARCHIVE_BYTES, ArchivedSegment, EventArchive
from deltawire.wire.objects import decode_packed, encode_packed

ARCHIVE_AFTER_S = 600.0
EVERY_S = 60.0
COMPACT_EVERY_S = 600.0
"""How often the streams of living processes are listed."""
COMPACT_SEGMENTS = 256
KEPT_SEGMENTS = 8
"""The number of segments at the end of a living stream that stay regardless of age: views read the
last ones without the archives.
"""
MAX_SEGMENTS = 1024
"""The most segments in one archive, and thus requests before the thread checks whether to stop."""
TARGET_BYTES = MAX_ARCHIVE_BYTES // 4
READERS = 16
SO = "its stream is not archived any further"


class EventArchiver(threading.Thread):
    """Archives, in a thread, the streams of workers that are gone and old segments of living
    streams.

    Supervisors' streams stay: they are short, and views read them whole. Archives that were stored
    more than ``keep_days`` ago are deleted; 0 keeps all. Raises no errors: the next round repeats a
    failed attempt. ``alarm`` says what could not be read in the last one; empty if all could.

    Example::

        archiver = EventArchiver(bucket, keep_days=7)
        archiver.start()
        archiver.close()
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        after_s: float = ARCHIVE_AFTER_S,
        compact_segments: int = COMPACT_SEGMENTS,
        keep_days: float = 0.0,
        floors: RetainedFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="event-archiver", daemon=True)
        self.alarm = ""
        self._bucket = bucket
        self._fleet = Fleet(bucket, silence_s=after_s)
        self._after_s = after_s
        self._compact_segments = compact_segments
        self._keep_s = keep_days * 86400
        self._floors = floors or RetainedFile(bucket)
        self._clock = clock
        self._gone_at: dict[str, float] = {}
        self._compact_at = float("-inf")
        self._next: int | None = None
        self._unread: list[UnreadableError] = []
        """The segments that this round could not read."""
        self._closed = threading.Event()

    def run(self) -> None:
        """Archives every `EVERY_S` until `close`."""
        while not self._closed.wait(EVERY_S):
            self.round()

    def round(self) -> None:
        """Archives what is due, and notes in ``alarm`` what prevented it."""
        try:
            self.archive()
        except (UnreadableError, InputError) as error:
            self.alarm = str(error)
        except DeltawireError:
            pass  # The store does not answer, which shows elsewhere.

    def archive(self) -> int:
        """Archives what is due; returns the number of streams that were due as a whole.

        Raises `UnreadableError` if the floors cannot be read, and `RetryError`.
        """
        now = self._clock()
        self._unread.clear()
        self._fleet.poll()
        streams = {name for name in self._bucket.list_prefixes(keys.EVENTS) if _is_archived(name)}
        gone = {name for name in streams - self._fleet.streams if not _is_fixed(name)}
        self._gone_at = {stream: self._gone_at.get(stream, now) for stream in gone}
        due = sorted(s for s, since in self._gone_at.items() if now - since >= self._after_s)
        self._store_all((stream, self._numbers(stream)) for stream in due)
        if now >= self._compact_at:
            self._store_all((s, self._old_numbers(s)) for s in sorted(streams - gone))
            self._delete_old()
            self._compact_at = now + COMPACT_EVERY_S
        self.alarm = str(self._unread[0]) if self._unread else ""
        return len(due)

    def close(self) -> None:
        """Ends the thread once its last request is answered."""
        self._closed.set()
        if self.is_alive():
            self.join()

    def _numbers(self, stream: str) -> list[int]:
        return [number_of(entry) for entry in segments(self._bucket, stream)]

    def _old_numbers(self, stream: str) -> list[int]:
        """Returns the segments of a living stream to archive: old by the store's clock, and
        many.
        """
        listed = segments(self._bucket, stream)
        if len(listed) < self._compact_segments:
            return []
        latest = listed[-1].modified.timestamp()
        old = [
            number_of(entry)
            for entry in listed[:-KEPT_SEGMENTS]
            if latest - entry.modified.timestamp() >= self._after_s
        ]
        return old if len(old) >= self._compact_segments else []

    def _store_all(self, streams: Iterator[tuple[str, list[int]]]) -> None:
        """Archives these segments, many streams in one object."""
        batch: list[ArchivedSegment] = []
        size = 0
        with ThreadPoolExecutor(READERS, "event-archiver") as readers:
            for stream, numbers in streams:
                for segment in self._read_all(stream, numbers, readers):
                    if self._closed.is_set():
                        return
                    bytes_then = size + len(segment.data)
                    if batch and (len(batch) >= MAX_SEGMENTS or bytes_then > TARGET_BYTES):
                        self._store(batch, readers)
                        batch, size = [], 0
                    batch.append(segment)
                    size += len(segment.data)
            if batch:
                self._store(batch, readers)

    def _read_all(
        self, stream: str, numbers: Sequence[int], readers: ThreadPoolExecutor
    ) -> Iterator[ArchivedSegment]:
        """Reads segments of a stream in order, up to the first that cannot be read: readers never
        come back to one that is archived after later ones."""
        for start in range(0, len(numbers), READERS):
            named = [(stream, number) for number in numbers[start : start + READERS]]
            for found in readers.map(self._read, named):
                if isinstance(found, UnreadableError):
                    self._unread.append(found)
                    return
                if found is not None:
                    yield found

    def _read(self, named: tuple[str, int]) -> ArchivedSegment | UnreadableError | None:
        """Reads a segment, None if it is gone. Of one that exceeds the limit, which no reader
        takes, it returns no bytes."""
        key = keys.events(*named)
        try:
            if self._is_signed:
                read = partial(self._bucket.get, key, limit=TARGET_BYTES)
                data = require_evidence(self._bucket, key, read, so=SO)
            else:
                data = require_agreed(self._bucket, key, limit=TARGET_BYTES, so=SO)
        except UnreadableError as error:
            if (self._bucket.size(key) or 0) <= TARGET_BYTES:
                return error
            data = b""
        return None if data is None else ArchivedSegment(*named, data)

    @property
    def _is_signed(self) -> bool:
        """True if reading a segment checks its bytes."""
        layer = signing(self._bucket)
        return layer is not None and layer.trust is not None

    def _store(self, batch: Sequence[ArchivedSegment], deleters: ThreadPoolExecutor) -> None:
        data = encode_packed(EventArchive(segments=list(batch)))
        if self._next is None:
            floor = self._floors.read().archives
            self._next = floor + len(_without_gaps(_archives(self._bucket), floor))
        while True:
            created = self._bucket.create(keys.archive(self._next), data)
            self._next += 1
            # No reader reads below the floor, which another trainer may have raised meanwhile.
            if created and self._next > (floor := self._floors.read().archives):
                break
            if created:
                self._next = max(self._next, floor)
        deleted = (keys.events(segment.stream, segment.number) for segment in batch)
        list(deleters.map(self._bucket.delete, deleted))

    def _delete_old(self) -> None:
        """Deletes archives that are too old, by the store's clock, once the floor is above them."""
        if not self._keep_s:
            return
        floor, listed = self._floors.read().archives, _archives(self._bucket)
        stored = _without_gaps(listed, floor)
        if stored:
            latest = max(listed[number] for number in stored)
            old = [number for number in stored if latest - listed[number] > self._keep_s]
            floor = max([floor, *(number + 1 for number in old)])
            self._floors.raise_to(archives=floor)
        for number in listed:
            if number < floor:
                self._bucket.delete(keys.archive(number))


def _is_archived(stream: str) -> bool:
    return keys.valid_name(stream) and not stream.startswith("supervisor-")


def _is_fixed(stream: str) -> bool:
    """Returns whether this is the stream of a supervisor; these are few and stay."""
    return stream.rpartition("-")[0] in get_args(Role)


def _archives(bucket: Bucket) -> dict[int, float]:
    """Returns the time, by the store's clock, at which each archive was stored."""
    return {
        number: entry.modified.timestamp()
        for entry in bucket.list_objects(keys.ARCHIVE)
        if (number := keys.trailing_number(entry.key)) is not None
        and entry.key == keys.archive(number)
    }


def _without_gaps(numbers: Container[int], floor: int) -> list[int]:
    """Returns the numbers from ``floor`` up to the first missing one: a stray key with a large
    number is not an archive.
    """
    return list(takewhile(lambda number: number in numbers, count(floor)))


def read_archive(bucket: Bucket, number: int) -> list[ArchivedSegment] | None:
    """Returns the segments of one archive, None if it does not exist; none for a damaged one."""
    key = keys.archive(number)
    try:
        data = bucket.get(key, limit=MAX_ARCHIVE_BYTES)
        if data is None:
            return None
        return decode_packed(data, EventArchive, run=bucket.url, key=key).segments
    except CorruptError:
        return []  # A view shows the other archives; nothing is deleted for it.


def archived_segments(bucket: Bucket) -> Iterator[ArchivedSegment]:
    """Returns the segments in all archives that retention kept."""
    for number in count(read_retained(bucket).archives):
        found = read_archive(bucket, number)
        if found is None:
            return
        yield from found
