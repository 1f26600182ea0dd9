"""Where each series of a run's events goes on, so that who follows one asks for what is new alone.

A reader relies on what docs/FORMAT.md says of events: a series has one writer, which numbers its
segments from 0 without a gap, begins none before the one ahead of it is stored, and never changes
one. The key of the next segment is therefore known, and that it is not there says that there is
nothing new yet; the newest one is found by doubling and halving, in 2 log n questions.

What is not relied on: that a segment stays. Somebody's rule may delete old ones, under a reader or
before there is one. Then there is no next segment for ever, which looks like a writer that says
nothing, so a series that was quiet for `QUIET_S` is listed behind the last segment read. A writer
that was quiet for q is asked after every q/8, at most `LONGEST_S`: of processes that ended long
ago there may be thousands.
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
QUIET_SHARE = 8.0
LONGEST_S = 3600.0
PATIENCE = 20.0
"""A listing is asked for again after so many times as long as it took: a twentieth of the time."""


@dataclass
class Place:
    """Where a reader stands in one series: the number of the segment that it reads next."""

    series: str
    next: int = 0
    heard_at: float = 0.0
    due_at: float = float("-inf")
    met: bool = False
    """Whether any segment was found."""

    @property
    def key(self) -> str:
        """The next segment's key."""
        return keys.events(self.series, self.next)


class Places:
    """A reader's places in all series of a run.

    New series are looked for among their names alone, at most every ``names_every_s``.
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
        self._known: dict[str, Place] = {}
        self._names_due_at = float("-inf")

    def new_names(self, *, everything: bool = False) -> list[str]:
        """Series that `add` was not told of yet."""
        now = self._clock()
        if now < self._names_due_at and not everything:
            return []
        found = self._bucket.list_prefixes(keys.EVENTS)
        took = self._clock() - now
        self._names_due_at = now + max(self._every_s, PATIENCE * took)
        return [name for name in found if name not in self._known and keys.valid_name(name)]

    def add(self, series: str, *, number: int = 0, quiet_s: float = 0.0) -> None:
        """Follow a series from this number on; it was quiet for ``quiet_s`` already."""
        now = self._clock()
        place = Place(series, number, heard_at=now - quiet_s, met=number > 0)
        place.due_at = now + _rest_s(quiet_s)
        self._known[series] = place

    def due(self, *, everything: bool = False) -> list[Place]:
        """Those to be asked for their next segment now."""
        now = self._clock()
        return [place for place in self._known.values() if everything or place.due_at <= now]

    def advance(self, place: Place) -> None:
        """A place's next segment was read, or cannot be."""
        place.next += 1
        place.met = True
        place.heard_at = self._clock()

    def skip_gap(self, place: Place, *, everything: bool = False) -> bool:
        """The next segment is not there: whether there is one behind it, and ``place`` is at it.

        Asked of a series of which nothing was ever found, and of one that was quiet for long.
        """
        began = self._clock()
        quiet = began - place.heard_at
        if place.met and quiet < QUIET_S and not everything:
            return False
        behind = segments(self._bucket, place.series, place.next - 1)
        now = self._clock()
        if behind:
            place.next = number_of(behind[0])
            return True
        place.due_at = now + min(max(_rest_s(quiet), PATIENCE * (now - began)), LONGEST_S)
        return False


def _rest_s(quiet_s: float) -> float:
    """How long to leave a writer alone that was quiet for so long."""
    return min(quiet_s / QUIET_SHARE, LONGEST_S) if quiet_s >= QUIET_S else 0.0


def number_of(segment: ObjectMeta) -> int:
    """A segment's number in its series."""
    return keys.trailing_number(segment.key) or 0


def segments(bucket: Bucket, series: str, behind: int = -1) -> list[ObjectMeta]:
    """A series' segments with numbers above ``behind``, in order, by listing."""
    after = keys.events(series, behind) if behind >= 0 else None
    found = bucket.list_objects(f"{keys.EVENTS}{series}/", after=after)
    return sorted(
        (entry for entry in found if entry.key == keys.events(series, number_of(entry))),
        key=number_of,
    )


def newest_segment(bucket: Bucket, series: str) -> ObjectMeta | None:
    """The newest segment of a series, None if it has none."""
    newest = bucket.head(keys.events(series, 0))
    if newest is None:
        listed = segments(bucket, series)
        return listed[-1] if listed else None
    stride = 1
    while (found := _look(bucket, series, number_of(newest) + stride)) is not None:
        newest, stride = found, 2 * stride
    while stride > 1:
        stride //= 2
        newest = _look(bucket, series, number_of(newest) + stride) or newest
    return newest


def first_since(bucket: Bucket, series: str, newest: int, since_s: float) -> int:
    """The number from which on a series' segments are not older than ``since_s`` by the store's
    clock, as far as that runs forward; ``newest`` is a number that is not older."""

    def recent(number: int) -> bool:
        entry = _look(bucket, series, number)
        return entry is not None and entry.modified.timestamp() >= since_s

    first, stride = newest, 1
    while first >= stride and recent(first - stride):
        first, stride = first - stride, 2 * stride
    while stride > 1:
        stride //= 2
        if first >= stride and recent(first - stride):
            first -= stride
    return first


def _look(bucket: Bucket, series: str, number: int) -> ObjectMeta | None:
    return bucket.head(keys.events(series, number)) if number <= keys.MAX_NUMBER else None


def follow(
    places: Places, place: Place, ask: Callable[[str], Found | None], *, everything: bool = False
) -> Iterator[Found]:
    """What ``ask`` finds at the key of each segment that has come since, until it finds None.

    Whoever takes one has done with it once he asks for the next; if he does not, because the store
    did not answer, it comes again.
    """
    while True:
        found = ask(place.key) if place.next <= keys.MAX_NUMBER else None
        if found is not None:
            yield found
            places.advance(place)
        elif not places.skip_gap(place, everything=everything):
            return
