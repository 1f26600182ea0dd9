"""Small objects, one a name, of which most belong to processes that ended long ago.

Heartbeats and pulses are never deleted, and a fleet whose workers come and go never uses a name
twice. So that a look does not take longer for each name there ever was, a roster reads again only
what a listing says has changed, and lists no more often than costs a twentieth of the time.

Why nothing that lives is missed. Whoever lives puts his object anew every few seconds, which gives
it another stamp: its age by the store's clock, and its size. Stamps are compared for being the same
and never for which is later, so a store's clock may jump. Two puts within one tick of it, a whole
second on S3, may share a stamp; an object is therefore read at each look until one that began
`SETTLED_S` after its stamp was first seen, and the last put under a stamp is not missed either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from deltawire.errors import CorruptError
from deltawire.store import Bucket

SETTLED_S = 3.0
PATIENCE = 20.0

T = TypeVar("T")


@dataclass
class _Known(Generic[T]):
    stamp: tuple[datetime, int]
    stamped_at: float
    settled: bool = False
    value: T | None = None
    error: CorruptError | None = None


class Roster(Generic[T]):
    """The objects under ``prefix`` by name, as ``read`` makes them of their keys.

    ``read`` gets a key and answers None for what is not there; it is called from several threads
    if ``readers`` is more than one. What it raises `CorruptError` for is read again at each look:
    a network may cut an answer short and call it whole.
    """

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        name_of: Callable[[str], str | None],
        read: Callable[[str], T | None],
        *,
        readers: int = 1,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._name_of = name_of
        self._read = read
        self._readers = readers
        self._most = most
        self._clock = clock
        self._known: dict[str, _Known[T]] = {}
        self._keys: dict[str, str] = {}
        self._stirring: list[str] = []
        self._list_due_at = float("-inf")
        self.left_out = 0
        """Names beyond ``most``: those whose objects were put longest ago."""

    @property
    def names(self) -> set[str]:
        """All that have an object."""
        return set(self._known)

    @property
    def values(self) -> dict[str, T]:
        """What was last read, by name."""
        found = ((name, self._known[name].value) for name in sorted(self._known))
        return {name: value for name, value in found if value is not None}

    @property
    def errors(self) -> list[CorruptError]:
        """What is wrong with those that cannot be read, by name."""
        found = (self._known[name].error for name in sorted(self._known))
        return [error for error in found if error is not None]

    def look(self) -> dict[str, T]:
        """What was read now: all that may have changed. Raises `RetryError`."""
        began = self._clock()
        if began >= self._list_due_at:
            self._list()
        wanted = self._stirring
        for name, found in zip(wanted, self._read_all(wanted), strict=True):
            known = self._known[name]
            known.error = found if isinstance(found, CorruptError) else None
            known.value = None if isinstance(found, CorruptError) else found
            known.settled = known.error is None and began - known.stamped_at >= SETTLED_S
        read = ((name, self._known[name].value) for name in wanted)
        return {name: value for name, value in read if value is not None}

    def _list(self) -> None:
        began = self._clock()
        entries = [(self._name_of(e.key), e) for e in self._bucket.list_objects(self._prefix)]
        named = [(name, entry) for name, entry in entries if name is not None]
        now = self._clock()
        self._list_due_at = now + PATIENCE * (now - began)
        if self._most is not None and len(named) > self._most:
            named.sort(key=lambda found: found[1].modified, reverse=True)
        self.left_out = 0 if self._most is None else max(0, len(named) - self._most)
        before, self._known = self._known, {}
        for name, entry in named[: self._most]:
            stamp, known = (entry.modified, entry.bytes), before.get(name)
            if known is None or known.stamp != stamp:
                known = _Known(stamp, now)
            self._known[name] = known
            self._keys[name] = entry.key
        self._keys = {name: self._keys[name] for name in self._known}
        self._stirring = sorted(name for name, known in self._known.items() if not known.settled)

    def _read_all(self, names: Sequence[str]) -> list[T | CorruptError | None]:
        keys = [self._keys[name] for name in names]
        if self._readers == 1 or len(keys) < 2:
            return [self._attempt(key) for key in keys]
        with ThreadPoolExecutor(self._readers) as pool:
            return list(pool.map(self._attempt, keys))

    def _attempt(self, key: str) -> T | CorruptError | None:
        try:
            return self._read(key)
        except CorruptError as error:
            return error
