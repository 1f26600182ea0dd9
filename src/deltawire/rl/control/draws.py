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
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from deltawire.rl.allocation.allocator import OpenParts
from deltawire.wire.status import Draws

NOT_KNOWN = -1
"""Instead of a position: the number had one, which was given to another since."""
RUN_STREAM = "run"
"""The stream of tasks that positions count in."""


class Drawn(NamedTuple):
    """One draw: a position, and with allocation the number of completions (0:
    ``rollout.group_size``) and the part of the prompt: 0 for a pilot."""

    position: int
    size: int = 0
    part: int = 0


class DrawSource(Protocol):
    """Decides what is drawn next (`deltawire.rl.allocation.allocator.Allocator`)."""

    first: int

    def take_fill(self) -> tuple[int, int, int] | None:
        """Grants a fill: position, size and part; None without one."""
        ...

    def take_due(self) -> int | None:
        """Grants the pilot of a deferred position; None without one."""
        ...

    def next_position(self, position: int) -> int:
        """The first position from ``position`` on that is drawn."""
        ...


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
        source: DrawSource | None = None,
    ) -> None:
        self.source = source
        self.completions = 0
        """The size of prompts from now on, where a controller sets it; 0: as configured."""
        self.next_position = next_position
        """All positions below it were given out."""
        self._returned = sorted(set(returned))
        self._held: dict[tuple[str, int], dict[int, Drawn]] = {}
        self._below: dict[tuple[str, int], int] = {}
        self._arrived: dict[tuple[str, int], tuple[int, int]] = {}
        self._leases: dict[str, set[int]] = {}
        """By worker, the leases that ``_below`` has."""
        self._last: dict[str, int] = {}
        """By worker, the latest lease with draws."""
        for worker, leases in (draws or {}).items():
            for one in leases:
                key = worker, one.lease
                count = len(one.numbers)
                sizes, parts = one.sizes or [0] * count, one.parts or [0] * count
                places = zip(one.positions, sizes, parts, strict=False)
                self._held[key] = dict(zip(one.numbers, map(Drawn._make, places), strict=False))
                self._below[key] = one.below
                self._leases.setdefault(worker, set()).add(one.lease)
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
            for before in [one for one in self._leases.get(worker, ()) if one < lease]:
                self._give_back((worker, before))
        key = worker, lease
        held = self._held.setdefault(key, {})
        for number in range(self._below.get(key, 0), count):
            held[number] = self._take()
        self._below[key] = max(count, self._below.get(key, 0))
        self._leases.setdefault(worker, set()).add(lease)

    def position(self, worker: str, lease: int, number: int) -> int | None:
        """The position that a number holds, None if it holds none."""
        drawn = self._held.get((worker, lease), {}).get(number)
        return None if drawn is None else drawn.position

    def part(self, worker: str, lease: int, number: int) -> int:
        """The part of its prompt that a number holds; 0 if it holds nothing."""
        drawn = self._held.get((worker, lease), {}).get(number)
        return 0 if drawn is None else drawn.part

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
        for lease in list(self._leases.get(worker, ())):
            self._give_back((worker, lease))

    @property
    def positions(self) -> set[int]:
        """The positions that numbers hold."""
        return {drawn.position for held in self._held.values() for drawn in held.values()}

    def owed(self, unstored: Mapping[str, int]) -> OpenParts:
        """The parts that were granted to workers which are alive, and have not arrived.

        ``unstored`` counts, for each living worker, the granted groups that it has not stored. Of
        its draws that have not arrived, as many of the newest are under way; any others were
        stored and could not be read.
        """
        by_position: Counter[int] = Counter()
        pilots = 0
        for drawn in self._missing(unstored):
            by_position[drawn.position] += 1
            pilots += not drawn.part
        return OpenParts(by_position, pilots)

    def _missing(self, unstored: Mapping[str, int]) -> list[Drawn]:
        """Draws whose groups are under way; see `owed`."""
        stored = {(worker, lease, number) for (worker, _), (lease, number) in self._arrived.items()}
        found: dict[str, list[tuple[int, int, Drawn]]] = {}
        for (worker, lease), held in self._held.items():
            if worker in unstored:
                found.setdefault(worker, []).extend(
                    (lease, number, drawn)
                    for number, drawn in held.items()
                    if (worker, lease, number) not in stored
                )
        return [
            drawn
            for worker, draws in found.items()
            for _, _, drawn in sorted(draws)[max(0, len(draws) - unstored[worker]) :]
        ]

    def missing(self, worker: str, unstored: int) -> int:
        """The number of a worker's draws that are under way; see `owed`."""
        return len(self._missing({worker: unstored}))

    def outstanding(
        self, unstored: Mapping[str, int], *, without: Collection[tuple[str, int]]
    ) -> tuple[int, int]:
        """The prompts and the completions that are granted and not settled.

        ``unstored`` is that of `owed`; ``without`` names stored groups that hold no credit any
        more, as (worker, sequence).
        """
        positions: set[int] = set()
        completions = 0
        for drawn in self._missing(unstored):
            positions.add(drawn.position)
            completions += drawn.size
        for (worker, sequence), (lease, number) in self._arrived.items():
            held = self._held.get((worker, lease), {}).get(number)
            if held is not None and (worker, sequence) not in without:
                positions.add(held.position)
                completions += held.size
        return len(positions), completions

    def listed(self) -> dict[str, list[Draws]]:
        """The tasks that workers hold, for ``trainer.json``."""
        found: dict[str, list[Draws]] = {}
        for (worker, lease), below in sorted(self._below.items()):
            held = self._held.get((worker, lease), {})
            numbers = sorted(held)
            sizes = [held[number].size for number in numbers]
            one = Draws(
                lease=lease,
                below=below,
                numbers=numbers,
                positions=[held[number].position for number in numbers],
                sizes=sizes if self.source or any(sizes) else [],
                parts=[held[number].part for number in numbers] if self.source else [],
            )
            found.setdefault(worker, []).append(one)
        return found

    @property
    def returned(self) -> list[int]:
        """Positions that were given back, in order."""
        return sorted(self._returned)

    def _take(self) -> Drawn:
        source = self.source
        if source is not None and (fill := source.take_fill()) is not None:
            return Drawn(*fill)
        size = self.completions if source is None else source.first
        if self._returned:
            return Drawn(heapq.heappop(self._returned), size)
        if source is not None:
            if (due := source.take_due()) is not None:
                return Drawn(due, size)
            self.next_position = source.next_position(self.next_position)
        self.next_position += 1
        return Drawn(self.next_position - 1, size)

    def _give_back(self, key: tuple[str, int]) -> None:
        """Ends a lease: its positions are free, except those whose groups are stored."""
        stored = {
            number
            for (worker, _), (lease, number) in self._arrived.items()
            if (worker, lease) == key
        }
        held = self._held.get(key, {})
        for number in held.keys() - stored:
            drawn = held.pop(number)
            if not drawn.part:  # The prompt of a fill asks again.
                heapq.heappush(self._returned, drawn.position)
        if not held:
            self._held.pop(key, None)
            self._below.pop(key, None)
            self._leases.get(key[0], set()).discard(key[1])
