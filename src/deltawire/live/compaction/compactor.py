"""Compactor: merges small segments of a stream into larger ones, and deletes those that are old.

::

    segments 0 1 2 … ──16──▶ compacted, level 1 ──16──▶ level 2 ──16──▶ level 3 …
    (the newest 16 stay for a day, for readers)          until `FULL_BYTES`

A row is written once for each level, and n segments leave about 15 log16(n) objects and as many
indexes. The rows of an object that was stored and read back are in two places until its inputs are
deleted. Readers count each row once, so a compactor may be killed anywhere, and two may run at a
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deltawire.errors import UnreadableError
from deltawire.live.compaction.storing import (
    delete_compacted,
    replace_compacted,
    store_compacted,
    void_pending,
)
from deltawire.live.compaction.stream_rows import StreamRows
from deltawire.runtime.compacted_segments import (
    CompactedListing,
    list_compacted,
    require_index,
)
from deltawire.store import Bucket, ObjectMeta
from deltawire.wire import keys
from deltawire.wire.compacted import MAX_COMPACTED_ROWS, CompactedIndex, CompactedName, NumberedRow

FAN_IN = 16
KEPT = 16
"""The newest segments stay for `SETTLED_S`: readers that follow find them under their own keys."""
FULL_BYTES = 32 << 20
"""An object of this size is not merged any more."""
MAX_MERGED_BYTES = 64 << 20
SETTLED_S = 86400.0
"""Segments older than this are compacted however few they are, so that their age is indexed."""
ABANDONED_S = 3600.0
"""An announcement that is this old is of a writer that was killed."""
EXPIRED_ROWS_S = 86400.0
"""Rows are deleted at most this much later than their age says, since an object is rewritten
once a day."""


@dataclass(frozen=True)
class _Input:
    """A segment, by its number, or a compacted segment, by its name."""

    place: CompactedName | int
    first: int
    level: int
    bytes: int
    modified: float
    """In seconds since 1970."""


class StreamCompactor:
    """Compacts one stream of one gateway, or the lineages of one learner.

    ``alarm`` names what could not be read; it stays where it is, and the rest is compacted. Only
    segments with numbers less than what ``below`` returns are compacted; without it, all.

    Example::

        StreamCompactor(bucket, ServedRows("captures"), "g0").compact()
    """

    def __init__(
        self,
        bucket: Bucket,
        rows_of: StreamRows,
        owner: str,
        *,
        clock: Callable[[], float] = time.time,
        below: Callable[[], int] | None = None,
    ) -> None:
        self.alarm = ""
        self.stream = rows_of.stream
        self._bucket = bucket
        self._rows_of = rows_of
        self._owner = owner
        self._clock = clock
        self._below = below
        self._indexes: dict[CompactedName, CompactedIndex] = {}
        """Indexes that were read; they never change."""
        self._may_delete = False

    def compact(self) -> int:
        """Merges until nothing is due; returns how many objects it made. Raises `RetryError`."""
        self.alarm, made = "", 0
        listing = list_compacted(self._bucket, self.stream, self._owner)
        self._finish_abandoned(listing)
        levels: dict[int, list[_Input]] = {}
        for one in sorted(self._inputs(listing), key=lambda one: one.first):
            levels.setdefault(one.level, []).append(one)
        while due := self._take_due(levels):
            self._require_deletion()
            merged = self._merge(due)
            # Inputs that could not be read, or are gone, are left alone until the next call.
            if merged is not None:
                made += 1
                if merged.bytes < FULL_BYTES:
                    levels.setdefault(merged.level, []).append(merged)
        return made

    def expire(self, before: float) -> int:
        """Deletes the rows from before a time (seconds since 1970); returns how many. Raises
        `RetryError`. Objects that cannot be read stay, and are the ``alarm``.

        Segments are not looked into until they are compacted, within `SETTLED_S`.
        """
        deleted = 0
        listing = list_compacted(self._bucket, self.stream, self._owner)
        self._indexes = {one: i for one, i in self._indexes.items() if one in listing.indexes}
        for place in listing.names:
            if place in listing.segments:
                with self._alarmed():
                    deleted += self._expire(place, before)
        return deleted

    def _expire(self, place: CompactedName, before: float) -> int:
        index = self._indexes.get(place) or require_index(self._bucket, place)
        if index is None:
            return 0
        self._indexes[place] = index
        if index.oldest >= before - (EXPIRED_ROWS_S if index.newest >= before else 0.0):
            return 0
        rows = self._rows_of.compacted(self._bucket, place) or []
        left = self._rows_of.without_expired(self._bucket, rows, before)
        if len(left) < len(rows):
            replace_compacted(self._bucket, self._rows_of, place, left)
        return len(rows) - len(left)

    @contextmanager
    def _alarmed(self) -> Iterator[None]:
        """Leaves alone what cannot be read, and names it."""
        try:
            yield
        except UnreadableError as error:
            self.alarm = f"{error.message} ({error.key})"

    def _require_deletion(self) -> None:
        """Raises `InputError` if the store refuses deletions here: what is merged would be stored
        again and again. Deletes what is not there."""
        if not self._may_delete:
            name = keys.live_compacted_name(0, 0, "0" * 32)
            self._bucket.delete(keys.live_compacted(self.stream, self._owner, name))
            self._bucket.delete(self._segment_key(keys.MAX_NUMBER))
            self._may_delete = True

    def _inputs(self, listing: CompactedListing) -> list[_Input]:
        prefix = keys.live_segments(self.stream, self._owner)
        listed: dict[int, ObjectMeta] = {}
        for _ in range(2):
            for one in self._bucket.list_objects(prefix):
                number = keys.trailing_number(one.key)
                if number is not None:
                    listed[number] = one
        kept = set(sorted(listed)[-KEPT:])
        found = [
            _Input(number, number, 0, one.bytes, one.modified.timestamp())
            for number, one in listed.items()
            if number not in kept or self._age_s(one.modified.timestamp()) > SETTLED_S
        ]
        if self._below is not None and found:
            below = self._below()
            found = [one for one in found if one.first < below]
        for place, one in listing.segments.items():
            first, last = place.span
            if one.bytes < FULL_BYTES:
                level = _level_of(last - first + 1)
                found.append(_Input(place, first, level, one.bytes, one.modified.timestamp()))
        return found

    def _take_due(self, levels: dict[int, list[_Input]]) -> list[_Input]:
        """Takes what to merge next out of ``levels``: the oldest `FAN_IN` objects of a level, the
        lowest first, or all segments of one that have settled."""
        for level in sorted(levels):
            same = levels[level]
            if len(same) >= FAN_IN:
                due = _within_limits(same[:FAN_IN])
                del same[: len(due)]
                return due
            due = _within_limits([one for one in same if self._has_settled(one)])
            if due:
                levels[level] = [one for one in same if one not in due]
                return due
        return []

    def _has_settled(self, one: _Input) -> bool:
        return isinstance(one.place, int) and self._age_s(one.modified) > SETTLED_S

    def _merge(self, inputs: Sequence[_Input]) -> _Input | None:
        """Stores the rows of these inputs as one object, then deletes the inputs that were read;
        returns the object, None if there is none."""
        rows: list[NumberedRow] = []
        read: list[_Input] = []
        for one in inputs:
            found = None  # Also if another process has compacted or deleted it.
            with self._alarmed():
                found = self._read(one.place)
            if found is not None and len(rows) + len(found) <= MAX_COMPACTED_ROWS:
                rows += found
                read.append(one)
        if not read:
            return None
        made = store_compacted(self._bucket, self._rows_of, self._owner, rows)
        for one in read:
            if isinstance(one.place, int):
                self._bucket.delete(self._segment_key(one.place))
            else:
                delete_compacted(self._bucket, one.place)
        if made is None:
            return None
        size = sum(one.bytes for one in read)
        first, last = made.span
        return _Input(made, first, _level_of(last - first + 1), size, self._clock())

    def _read(self, place: CompactedName | int) -> list[NumberedRow] | None:
        if isinstance(place, int):
            return self._rows_of.read(self._bucket, self._owner, place)
        return self._rows_of.compacted(self._bucket, place, so="nothing was compacted")

    def _finish_abandoned(self, listing: CompactedListing) -> None:
        """Deletes what writers that were killed left: announcements, void objects, an index without
        a segment. A segment that has lost its index holds rows, and gets a new one."""
        for place in self._old(listing.pending):
            with self._alarmed():
                if place not in listing.segments:
                    void_pending(self._bucket, place)
                self._bucket.delete(place.announcement_key)
        for place in self._old(listing.indexes):
            if place not in listing.segments:
                with self._alarmed():
                    if self._rows_of.compacted(self._bucket, place) is None:
                        self._bucket.delete(place.index_key)
        for place in self._old(listing.segments):
            if place not in listing.indexes:
                with self._alarmed():
                    rows = self._rows_of.compacted(self._bucket, place)
                    if rows is not None:
                        replace_compacted(self._bucket, self._rows_of, place, rows)

    def _old(self, listed: dict[CompactedName, ObjectMeta]) -> list[CompactedName]:
        return [
            place
            for place, one in listed.items()
            if self._age_s(one.modified.timestamp()) > ABANDONED_S
        ]

    def _segment_key(self, number: int) -> str:
        return f"{keys.live_segments(self.stream, self._owner)}{number:010d}"

    def _age_s(self, modified: float) -> float:
        return self._clock() - modified


def _level_of(span: int) -> int:
    level = 0
    while span >= FAN_IN:
        span //= FAN_IN
        level += 1
    return level


def _within_limits(inputs: Sequence[_Input]) -> list[_Input]:
    """Returns the first inputs that fit into one object; at least two, of which a larger one may
    be made, since none of them is full."""
    size = 0
    found: list[_Input] = []
    for one in inputs:
        if len(found) >= 2 and size + one.bytes > MAX_MERGED_BYTES:
            break
        size += one.bytes
        found.append(one)
    return found
