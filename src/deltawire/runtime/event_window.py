"""Event window: the newest events of a run, for views that need no history."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from deltawire.events import Event
from deltawire.runtime.event_cursor import (
    Cursor,
    Cursors,
    first_since,
    follow,
    newest_segment,
    number_of,
    segments,
)
from deltawire.runtime.event_tail import read_segment
from deltawire.store import Bucket
from deltawire.store.bucket import ObjectMeta
from deltawire.wire import keys

MAX_EVENT_BYTES = 256 << 20
"""Reads the newest segments up to this total size in bytes; older ones are left out."""
TAIL = 3
"""The number of segments at the end of each stream that are read regardless of age."""
READERS = 64

_T = TypeVar("_T")
_V = TypeVar("_V")


@dataclass(frozen=True)
class _Segment:
    entry: ObjectMeta
    events: list[Event]


class RecentEvents:
    """The events of the last ``window_s`` seconds before the newest segment, by the store's clock.

    The last segments of each stream are included, and all of a supervisor's, which are few. The
    first read finds the end of each stream; later ones read what is new.

    Example::

        window = RecentEvents(bucket, window_s=300.0)
        events = window.read()
    """

    def __init__(
        self, bucket: Bucket, window_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._window_s = window_s
        self._cursors = Cursors(bucket, clock=clock)
        self._kept: dict[str, _Segment] = {}
        self.unreadable: dict[str, int] = {}
        """By stream, how many of the segments read so far held no event of its process: they are
        damaged, or another program stored them.
        """

    def read(self, *, everything: bool = False) -> list[Event]:
        """Returns the events; raises `RetryError`.

        Segments after a gap may come with a later call, unless ``everything`` asks for them now.
        """
        before = set(self._kept)
        fresh = self._cursors.refresh(everything=everything)
        # Segments of streams that were archived meanwhile are older than any window, and must not
        # decide where it ends.
        existing = {*fresh, *(cursor.stream for cursor in self._cursors.active)}
        self._kept = {k: one for k, one in self._kept.items() if keys.stream_of(k) in existing}
        _each(lambda cursor: self._follow(cursor, everything=everything), self._cursors.active)
        self._enter(fresh)
        for key, found in self._kept.items():
            if key not in before and not found.events and (stream := keys.stream_of(key)):
                self.unreadable[stream] = self.unreadable.get(stream, 0) + 1
        entries = [one.entry for one in self._kept.values()]
        wanted = {entry.key for entry in self._wanted(entries)}
        self._kept = {key: found for key, found in self._kept.items() if key in wanted}
        return [event for found in self._kept.values() for event in found.events]

    def _follow(self, cursor: Cursor, *, everything: bool) -> None:
        for entry in follow(self._cursors, cursor, self._bucket.head, everything=everything):
            self._keep(entry)

    def _enter(self, streams: Sequence[str]) -> None:
        """Starts to follow streams, each near its end.

        If the store does not answer meanwhile, they stay new, and segments that were read are not
        read again.
        """
        ends = _each(lambda name: newest_segment(self._bucket, name), streams)
        newest = dict(zip(streams, ends, strict=True))
        times = [entry.modified.timestamp() for entry in ends if entry is not None]
        latest = max((*times, self._latest()), default=0.0)
        lists = _each(lambda name: self._near_the_end(name, newest[name], latest), streams)
        wanted = self._wanted(entry for listed in lists for entry in listed)
        _each(self._keep, [entry for entry in wanted if entry.key not in self._kept])
        for name, listed in zip(streams, lists, strict=True):
            self._cursors.add(name, number=number_of(listed[-1]) + 1 if listed else 0)

    def _near_the_end(
        self, stream: str, newest: ObjectMeta | None, latest: float
    ) -> list[ObjectMeta]:
        if newest is None:
            return []
        if stream.startswith("supervisor-"):
            return segments(self._bucket, stream)
        last, since_s = number_of(newest), latest - self._window_s
        first = last + 1 - TAIL
        if newest.modified.timestamp() >= since_s:
            first = min(first, first_since(self._bucket, stream, last, since_s))
        return segments(self._bucket, stream, first - 1)

    def _keep(self, entry: ObjectMeta) -> None:
        self._kept[entry.key] = _Segment(entry, read_segment(self._bucket, entry.key) or [])

    def _latest(self) -> float:
        return max((s.entry.modified.timestamp() for s in self._kept.values()), default=0.0)

    def _wanted(self, entries: Iterable[ObjectMeta]) -> list[ObjectMeta]:
        return recent(entries, self._window_s)


def recent(entries: Iterable[ObjectMeta], window_s: float) -> list[ObjectMeta]:
    """Chooses the segments that a read returns, the newest first."""
    streams: dict[str, list[ObjectMeta]] = {}
    for entry in entries:
        if (name := keys.stream_of(entry.key)) is not None:
            streams.setdefault(name, []).append(entry)
    if not streams:
        return []
    latest = max(entry.modified.timestamp() for found in streams.values() for entry in found)
    wanted = []
    for name, found in streams.items():
        found.sort(key=number_of)
        keep = len(found) if name.startswith("supervisor-") else TAIL
        tail = {entry.key for entry in found[-keep:]}
        wanted += [
            entry
            for entry in found
            if entry.key in tail or entry.modified.timestamp() >= latest - window_s
        ]
    wanted.sort(key=lambda entry: (entry.modified, entry.key), reverse=True)
    chosen, total = [], 0
    for entry in wanted:
        total += entry.bytes
        if total > MAX_EVENT_BYTES:
            break
        chosen.append(entry)
    return chosen


def _each(action: Callable[[_T], _V], items: Sequence[_T]) -> list[_V]:
    """Calls ``action`` for each item, several at a time; raises the first error at the end."""
    if len(items) < 2:
        return [action(item) for item in items]
    with ThreadPoolExecutor(READERS) as threads:
        answers = [threads.submit(action, item) for item in items]
    return [answer.result() for answer in answers]
