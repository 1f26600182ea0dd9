"""Plans the cheapest route from the version held to the version wanted; performs no I/O.

Versions are nodes. A delta or a compacted delta is an edge from its base to its target; an anchor
is an edge to its version that starts from nothing and is open to every reader. All edges lead
forward, so one pass in the order of targets finds the cheapest route to every version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["delta", "compacted", "anchor"]


@dataclass(frozen=True)
class Edge:
    """A step from ``base`` (None: from nothing) to ``target`` that costs ``bytes``; the object at
    ``key`` states it.
    """

    base: int | None
    target: int
    bytes: int
    kind: Kind
    key: str


@dataclass(frozen=True)
class Route:
    """Consecutive edges, and the ``bytes`` that they cost together."""

    edges: tuple[Edge, ...]
    bytes: int

    @property
    def objects(self) -> int:
        """The number of deltas, compacted deltas and anchors to fetch."""
        return len(self.edges)


class CheapestRoutes:
    """The cheapest routes from ``held`` (None: from nothing) over ``edges`` to all versions.

    Minimizes bytes, then objects. Edges that do not lead forward are ignored. Takes time in
    proportion to the number of edges, plus sorting them.

    Example::

        routes = CheapestRoutes(3, [Edge(3, 4, 10, "delta", "a"), Edge(4, 5, 10, "delta", "b")])
        routes.route(5).bytes  # 20
    """

    def __init__(self, held: int | None, edges: Iterable[Edge]) -> None:
        self._held = held
        self._cost: dict[int, tuple[int, int]] = {} if held is None else {held: (0, 0)}
        self._last: dict[int, Edge] = {}
        for edge in sorted(edges, key=lambda edge: edge.target):
            if edge.base is not None and (edge.base >= edge.target or edge.base not in self._cost):
                continue
            start = (0, 0) if edge.base is None else self._cost[edge.base]
            cost = (start[0] + edge.bytes, start[1] + 1)
            if edge.target not in self._cost or cost < self._cost[edge.target]:
                self._cost[edge.target] = cost
                self._last[edge.target] = edge

    @property
    def newest(self) -> int | None:
        """The newest version that can be reached."""
        return max(self._cost, default=None)

    def route(self, target: int) -> Route | None:
        """Returns the cheapest route to ``target``, None if there is none."""
        if target not in self._cost:
            return None
        found: list[Edge] = []
        at: int | None = target
        while at is not None and at != self._held:
            found.append(self._last[at])
            at = self._last[at].base
        return Route(tuple(reversed(found)), self._cost[target][0])


def lowest_start(target: int, edges: Iterable[Edge]) -> int:
    """Returns the lowest version from which ``edges`` lead to ``target``, itself if none does.

    Objects of older versions cannot complete a route unless this version is one of them.
    """
    starts = {target}
    for edge in sorted(edges, key=lambda edge: edge.target, reverse=True):
        if edge.target in starts and edge.base is not None and edge.base < edge.target:
            starts.add(edge.base)
    return min(starts)
