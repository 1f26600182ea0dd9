"""Draws: which task each group is of, so that a run draws every task once an epoch.

The trainer numbers the draws of a run: position p is a place in the order of all tasks, in which
every row of a dataset occurs once an epoch (`deltawire.data.order`). For each worker and lease it
gives every number that the worker may start a position, in ``trainer.json``. So no two workers draw
the same position, whatever their number is, and a worker does not choose its tasks.

A position whose group never arrives is given to another number: once the worker's name has a later
lease and all that was stored before that lease has been read, and once the worker is gone for good
(`deltawire.runtime.reaper`). Positions that were given back are given out first. While a worker
that died has not returned and is not yet gone, its positions are missing in their epoch.

Restarts. ``trainer.json`` carries the book, and is written after each commit. A trainer that finds
an older one reads which groups the commits since then settled (`DrawBook.arrive`). If it is lost,
draws continue after the position that the newest step's commit metadata states: what was given out
and not yet trained on at that step is left out of its epoch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from deltawire.wire.status import Draws

NOT_KNOWN = -1
"""Instead of a position: the number had one, which was given to another since."""
RUN_STREAM = "run"
"""The stream of tasks that positions count in."""


class DrawBook:
    """The positions that workers hold, and the next one.

    Example::

        book = DrawBook()
        book.cover("w0", lease=0, count=4)
        position = book.arrive("w0", sequence=0, lease=0, number=2)
        book.settle("w0", 0)
    """

    def __init__(
        self,
        *,
        next_position: int = 0,
        returned: Iterable[int] = (),
        draws: Mapping[str, Sequence[Draws]] | None = None,
    ) -> None:
        self.next_position = next_position
        """All positions below it were given out."""
        self._returned = sorted(set(returned))
        self._held: dict[tuple[str, int], dict[int, int]] = {}
        self._below: dict[tuple[str, int], int] = {}
        self._arrived: dict[tuple[str, int], tuple[int, int]] = {}
        self._last: dict[str, int] = {}
        """By worker, the latest lease with draws."""
        for worker, leases in (draws or {}).items():
            for one in leases:
                key = worker, one.lease
                self._held[key] = dict(zip(one.numbers, one.positions, strict=False))
                self._below[key] = one.below
                self._last[worker] = max(one.lease, self._last.get(worker, 0))

    def cover(self, worker: str, lease: int, count: int, *, complete: bool = True) -> None:
        """Gives positions to the numbers below ``count`` of a worker's lease that never had one.

        With ``complete``, all groups that the worker stored under earlier leases have arrived: what
        those leases still hold is given back. An earlier lease than one that was covered gets
        nothing.
        """
        if self._last.get(worker, lease) > lease:
            return
        self._last[worker] = lease
        if complete:
            for key in [k for k in self._below if k[0] == worker and k[1] < lease]:
                self._give_back(key)
        key = worker, lease
        held = self._held.setdefault(key, {})
        for number in range(self._below.get(key, 0), count):
            held[number] = self._take()
        self._below[key] = max(count, self._below.get(key, 0))

    def position(self, worker: str, lease: int, number: int) -> int | None:
        """The position that a number holds, None if it holds none."""
        return self._held.get((worker, lease), {}).get(number)

    def arrive(self, worker: str, sequence: int, lease: int, number: int) -> int | None:
        """Notes that a group was stored, and returns its position.

        `NOT_KNOWN` if it has none any more, and None if its lease never had draws: its task is then
        from the worker's own stream.
        """
        position = self.position(worker, lease, number)
        if position is None:
            return NOT_KNOWN if lease <= self._last.get(worker, -1) else None
        self._arrived[worker, sequence] = lease, number
        return position

    def settle(self, worker: str, sequence: int) -> None:
        """Notes that a stored group was consumed or dropped: its position is used up."""
        if (place := self._arrived.pop((worker, sequence), None)) is not None:
            self._held.get((worker, place[0]), {}).pop(place[1], None)

    def forget(self, worker: str) -> None:
        """Gives back everything that a worker holds which is gone."""
        for key in [key for key in self._below if key[0] == worker]:
            self._give_back(key)

    def listed(self) -> dict[str, list[Draws]]:
        """The tasks that workers hold, for ``trainer.json``."""
        found: dict[str, list[Draws]] = {}
        for (worker, lease), below in sorted(self._below.items()):
            held = self._held.get((worker, lease), {})
            numbers = sorted(held)
            one = Draws(
                lease=lease,
                below=below,
                numbers=numbers,
                positions=[held[number] for number in numbers],
            )
            found.setdefault(worker, []).append(one)
        return found

    @property
    def returned(self) -> list[int]:
        """Positions that were given back, in order."""
        return sorted(self._returned)

    def _take(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self.next_position += 1
        return self.next_position - 1

    def _give_back(self, key: tuple[str, int]) -> None:
        """Ends a lease: its positions are free, except those whose groups are stored."""
        stored = {
            number
            for (worker, _), (lease, number) in self._arrived.items()
            if (worker, lease) == key
        }
        held = self._held.get(key, {})
        for number in held.keys() - stored:
            heapq.heappush(self._returned, held.pop(number))
        if not held:
            self._held.pop(key, None)
            self._below.pop(key, None)
