"""Cursors into event streams, so that readers fetch only new segments.

A reader relies on the rules of FORMAT-PROTOCOL.md: a stream has one writer, which numbers segments
from 0 without gaps, starts none before the previous one is stored, and never changes one. The key
of the next segment is therefore known, and a missing object means that there is nothing new. The
newest segment is found with doubling and halving steps, in 2 log n requests.

A reader must not rely on old segments, which move to archives (`deltawire.runtime.event_archive`)
before or while they are read, so that the cost of a read depends only on the living processes. The
next segment then never appears, as if the writer were quiet, so a stream that was quiet for
`QUIET_S` is listed after the last segment read. An archive is stored before its segments are
deleted: a reader of history that meets a gap reads new archives before it skips one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from deltawire.store import Bucket
from deltawire.store.bucket import ObjectMeta
from deltawire.wire import keys

Found = TypeVar("Found")

QUIET_S = 60.0
LISTING_PAUSE = 20.0
"""A listing is repeated after this multiple of its duration, so that it takes a twentieth of the
time.
"""


@dataclass
class Cursor:
    """The position of a reader in one stream: the number of the segment that it reads next."""

    stream: str
    next: int = 0
    gap_due_at: float = float("-inf")
    """The time of the next check for a gap."""

    @property
    def key(self) -> str:
        """The next segment's key."""
        return keys.events(self.stream, self.next)


class Cursors:
    """The positions of a reader in all streams of a run.

    Names of streams are listed at most every ``names_every_s``.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        names_every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._every_s = names_every_s
        self._clock = clock
        self._active: dict[str, Cursor] = {}
        self._read: dict[str, int] = {}
        self._names_due_at = float("-inf")

    def refresh(self, *, everything: bool = False) -> list[str]:
        """Lists the streams if a listing is due, and returns those for which `add` was not called
        yet.

        Cursors of streams that are gone become inactive.
        """
        now = self._clock()
        if now < self._names_due_at and not everything:
            return []
        found = {name for name in self._bucket.list_prefixes(keys.EVENTS) if keys.valid_name(name)}
        took = self._clock() - now
        self._names_due_at = now + max(self._every_s, LISTING_PAUSE * took)
        self._active = {name: one for name, one in self._active.items() if name in found}
        return sorted(found - self._active.keys())

    def add(self, stream: str, *, number: int = 0) -> None:
        """Follows a stream from this number on, or from where it was read to before."""
        number = max(number, self._read.get(stream, 0))
        # A stream that was not read yet may begin with a gap.
        gap_due_at = self._clock() + QUIET_S if number else float("-inf")
        self._active[stream] = Cursor(stream, number, gap_due_at)

    @property
    def active(self) -> list[Cursor]:
        """The cursors of all streams that exist."""
        return list(self._active.values())

    def position(self, stream: str) -> int:
        """Returns the number of the segment that is read next in a stream, active or not."""
        return self._read.get(stream, 0)

    def advance(self, stream: str, number: int) -> None:
        """Records that segment ``number`` of a stream was read, or cannot be read."""
        self._read[stream] = max(number + 1, self._read.get(stream, 0))
        cursor = self._active.get(stream)
        if cursor is not None:
            cursor.next = max(cursor.next, number + 1)
            cursor.gap_due_at = self._clock() + QUIET_S

    def skip_gap(
        self,
        cursor: Cursor,
        *,
        everything: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> bool:
        """Moves to the first segment after a gap, if there is one; True if the cursor moved.

        Checked only for streams that were quiet for `QUIET_S`, and for new ones. ``before`` is
        called first if there is a gap: it may read what is missing from an archive.
        """
        if self._clock() < cursor.gap_due_at and not everything:
            return False
        later = segments(self._bucket, cursor.stream, cursor.next - 1)
        if later:
            first = number_of(later[0])
            if first > cursor.next:
                before()
            cursor.next = max(cursor.next, first)
            return True
        cursor.gap_due_at = self._clock() + QUIET_S
        return False


def number_of(segment: ObjectMeta) -> int:
    """Returns a segment's number in its stream."""
    return keys.trailing_number(segment.key) or 0


def segments(bucket: Bucket, stream: str, after: int = -1) -> list[ObjectMeta]:
    """Lists a stream's segments with numbers above ``after``, in order."""
    start = keys.events(stream, after) if after >= 0 else None
    found = bucket.list_objects(f"{keys.EVENTS}{stream}/", after=start)
    return sorted(
        (entry for entry in found if entry.key == keys.events(stream, number_of(entry))),
        key=number_of,
    )


def newest_segment(bucket: Bucket, stream: str) -> ObjectMeta | None:
    """Finds the newest segment of a stream, None if it has none."""
    newest = bucket.head(keys.events(stream, 0))
    if newest is None:
        listed = segments(bucket, stream)
        return listed[-1] if listed else None
    stride = 1
    while (found := _head(bucket, stream, number_of(newest) + stride)) is not None:
        newest, stride = found, 2 * stride
    while stride > 1:
        stride //= 2
        newest = _head(bucket, stream, number_of(newest) + stride) or newest
    return newest


def first_since(bucket: Bucket, stream: str, newest: int, since_s: float) -> int:
    """Finds the first number from which on segments are not older than ``since_s``.

    Ages are by the store's clock, which is assumed to run forward; ``newest`` is a number that is
    not older.
    """

    def recent(number: int) -> bool:
        entry = _head(bucket, stream, number)
        return entry is not None and entry.modified.timestamp() >= since_s

    first, stride = newest, 1
    while first >= stride and recent(first - stride):
        first, stride = first - stride, 2 * stride
    while stride > 1:
        stride //= 2
        if first >= stride and recent(first - stride):
            first -= stride
    return first


def _head(bucket: Bucket, stream: str, number: int) -> ObjectMeta | None:
    return bucket.head(keys.events(stream, number)) if number <= keys.MAX_NUMBER else None


def follow(
    cursors: Cursors,
    cursor: Cursor,
    fetch: Callable[[str], Found | None],
    *,
    everything: bool = False,
    before_gap: Callable[[], None] = lambda: None,
) -> Iterator[Found]:
    """Yields ``fetch`` of each new segment's key until it returns None.

    ``before_gap`` is called before the cursor skips segments that are missing. A segment counts as
    read once the next one is asked for; if the caller stops before that, because the store did not
    answer, it is yielded again.
    """
    while True:
        found = fetch(cursor.key) if cursor.next <= keys.MAX_NUMBER else None
        if found is not None:
            yield found
            cursors.advance(cursor.stream, cursor.next)
        elif not cursors.skip_gap(cursor, everything=everything, before=before_gap):
            return
