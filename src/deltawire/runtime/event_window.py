"""The newest of a run's events, for who looks at it again and again and wants no history."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from deltawire.events import Event
from deltawire.runtime.event_cursor import (
    Place,
    Places,
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
"""Of events, the newest first; what is beyond is not read."""
TAIL = 3
"""Segments of each series that are read however old they are: its last words."""
READERS = 16

_T = TypeVar("_T")
_V = TypeVar("_V")


@dataclass(frozen=True)
class _Segment:
    entry: ObjectMeta
    events: list[Event]


class RecentEvents:
    """The events of the last ``window_s`` seconds, by the store's clock, before the newest segment;
    and the last words of each series, and all of a supervisor's, of which there are few.

    A first look asks where each series ends, and reads what is wanted. Later ones read what has
    come since.
    """

    def __init__(
        self, bucket: Bucket, window_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._window_s = window_s
        self._places = Places(bucket, clock=clock)
        self._kept: dict[str, _Segment] = {}
        self.unreadable = 0
        """Of the segments read by the last look, those that held no event."""

    def read(self, *, everything: bool = False) -> list[Event]:
        """The events; raises `RetryError`. What a process tells that was quiet for long may come
        later (`deltawire.runtime.event_cursor`), unless ``everything`` asks for that too."""
        before = set(self._kept)
        due = self._places.due(everything=everything)
        _each(lambda place: self._follow(place, everything=everything), due)
        self._enter(self._places.new_names(everything=everything))
        self.unreadable = sum(
            not found.events for key, found in self._kept.items() if key not in before
        )
        wanted = {entry.key for entry in self._wanted(s.entry for s in self._kept.values())}
        self._kept = {key: found for key, found in self._kept.items() if key in wanted}
        return [event for found in self._kept.values() for event in found.events]

    def _follow(self, place: Place, *, everything: bool) -> None:
        for entry in follow(self._places, place, self._bucket.head, everything=everything):
            self._take(entry)

    def _enter(self, names: Sequence[str]) -> None:
        """Begin to follow series, each near its end. If the store does not answer meanwhile they
        stay new, and what of them was read is not read again."""
        ends = _each(lambda name: newest_segment(self._bucket, name), names)
        newest = dict(zip(names, ends, strict=True))
        times = [entry.modified.timestamp() for entry in ends if entry is not None]
        latest = max((*times, self._latest()), default=0.0)
        lists = _each(lambda name: self._near_the_end(name, newest[name], latest), names)
        wanted = self._wanted(entry for listed in lists for entry in listed)
        _each(self._take, [entry for entry in wanted if entry.key not in self._kept])
        for name, listed in zip(names, lists, strict=True):
            if listed:
                quiet_s = latest - listed[-1].modified.timestamp()
                self._places.add(name, number=number_of(listed[-1]) + 1, quiet_s=quiet_s)
            else:
                self._places.add(name)

    def _near_the_end(
        self, series: str, newest: ObjectMeta | None, latest: float
    ) -> list[ObjectMeta]:
        if newest is None:
            return []
        if series.startswith("supervisor-"):
            return segments(self._bucket, series)
        last, since_s = number_of(newest), latest - self._window_s
        first = last + 1 - TAIL
        if newest.modified.timestamp() >= since_s:
            first = min(first, first_since(self._bucket, series, last, since_s))
        return segments(self._bucket, series, first - 1)

    def _take(self, entry: ObjectMeta) -> None:
        self._kept[entry.key] = _Segment(entry, read_segment(self._bucket, entry.key) or [])

    def _latest(self) -> float:
        return max((s.entry.modified.timestamp() for s in self._kept.values()), default=0.0)

    def _wanted(self, entries: Iterable[ObjectMeta]) -> list[ObjectMeta]:
        return recent(entries, self._window_s)


def recent(entries: Iterable[ObjectMeta], window_s: float) -> list[ObjectMeta]:
    """Of some segments those that a look wants, the newest first."""
    series: dict[str, list[ObjectMeta]] = {}
    for entry in entries:
        if (name := keys.series_of(entry.key)) is not None:
            series.setdefault(name, []).append(entry)
    if not series:
        return []
    latest = max(entry.modified.timestamp() for found in series.values() for entry in found)
    wanted = []
    for name, found in series.items():
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
    """``action`` of each, several at a time; raises the first error once all are done."""
    if len(items) < 2:
        return [action(item) for item in items]
    with ThreadPoolExecutor(READERS) as pool:
        answers = [pool.submit(action, item) for item in items]
    return [answer.result() for answer in answers]
