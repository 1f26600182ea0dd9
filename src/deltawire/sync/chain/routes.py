"""The planner: the cheapest way from the version held to the one wanted. Pure, no I/O.

Versions are the nodes. A delta and a fold are edges from their base to their target, an anchor is
an edge to its version from nowhere, open to everybody. All edges lead forward, so that one pass
in the order of targets finds the cheapest way to every version at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["delta", "fold", "anchor"]


@dataclass(frozen=True)
class Edge:
    """A way from ``base`` (None: from nothing) to ``target`` at the cost of ``bytes``, stated by
    the object at ``key``."""

    base: int | None
    target: int
    bytes: int
    kind: Kind
    key: str


@dataclass(frozen=True)
class Route:
    """Edges one behind the other; ``bytes`` is what they cost together."""

    edges: tuple[Edge, ...]
    bytes: int

    @property
    def objects(self) -> int:
        """How many deltas, folds and anchors are fetched."""
        return len(self.edges)


class Reach:
    """The cheapest routes from ``held`` (None: from nothing) over ``edges`` to all versions.

    Fewest bytes first, then fewest objects. Edges that do not lead forward are left out. Takes
    time in proportion to the edges, but for sorting them.
    """

    def __init__(self, held: int | None, edges: Iterable[Edge]) -> None:
        self._held = held
        self._cost: dict[int, tuple[int, int]] = {} if held is None else {held: (0, 0)}
        self._last: dict[int, Edge] = {}
        for edge in sorted(edges, key=lambda edge: edge.target):
            if edge.base is not None and (edge.base >= edge.target or edge.base not in self._cost):
                continue
            behind = (0, 0) if edge.base is None else self._cost[edge.base]
            cost = (behind[0] + edge.bytes, behind[1] + 1)
            if edge.target not in self._cost or cost < self._cost[edge.target]:
                self._cost[edge.target] = cost
                self._last[edge.target] = edge

    @property
    def newest(self) -> int | None:
        """The newest version that can be reached."""
        return max(self._cost, default=None)

    def route(self, target: int) -> Route | None:
        """The cheapest route to ``target``, None if there is none."""
        if target not in self._cost:
            return None
        found: list[Edge] = []
        at: int | None = target
        while at is not None and at != self._held:
            found.append(self._last[at])
            at = self._last[at].base
        return Route(tuple(reversed(found)), self._cost[target][0])


def plan(held: int | None, target: int, edges: Iterable[Edge]) -> Route | None:
    """The cheapest route from ``held`` to ``target``, None if there is none."""
    return Reach(held, edges).route(target)
