"""Admission: limits how many groups workers may start, so that none finishes too late.

The trainer at committed version v lets at most (S+1)·B groups be outstanding, where B groups make
a step and S is the staleness bound. Outstanding is every group that was granted and is not yet
settled; a group settles when the version that consumed it is committed, or when it is dropped.

Bound. Let a worker start a group at the version that was committed when it was granted, v, or a
later one. Fewer than (S+1)·B groups are unsettled ahead of it. If the trainer consumes in the order
of granting, those make at most S steps before the step that takes it, the first of them from v at
the earliest, so the group is consumed from version v+S at the latest. Its oldest token was sampled
at v or later, so its staleness is at most S. With S = 0 nothing is granted between a step's groups
and its commit: sampling and training alternate strictly. A worker on a slow link may start at a
version before v (`deltawire.rl.rollout.group_numbers.allowed_lag`); its groups are then older by as
much.

Credits go to workers that deliver. A worker that never stored a group may not exist, and names are
cheap: once another one has delivered, such workers get no more than half of the limit together. A
worker that gets no credit for long, because others hold the limit and deliver nothing, is on
``trial``: it gets one credit in excess of the limit, so that silent names starve no worker. These
are the only groups beyond the limit; workers that hold credits and never deliver lose their claim
(`deltawire.rl.control.credits`).

Workers finish out of order, so the argument bounds the aggregate. The trainer takes the oldest
groups first and drops those that still exceed S (`deltawire.rl.control.rollout_buffer`): the bound
holds for each group by enforcement, and admission keeps drops rare.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerLoad:
    """A worker as the trainer sees it: cumulative counts of groups granted, stored and settled."""

    granted: int
    stored: int
    settled: int
    alive: bool
    proven: bool = True
    """True if it has stored a group that could be used."""
    trial: bool = False
    """True if it gets one credit even beyond the limit."""


class _GrantOrder:
    """Workers in the order of their unfinished groups, then of their names."""

    def __init__(self, entries: list[tuple[int, str]]) -> None:
        heapq.heapify(entries)
        self.entries = entries

    def pop(self) -> tuple[int, str]:
        """Removes the first worker; returns its unfinished groups and its name."""
        return heapq.heappop(self.entries)


class _GrantQueue:
    """Workers that may be granted a group: those within their share of the limit, and the rest."""

    def __init__(self, entries: Iterable[tuple[int, str, bool]]) -> None:
        listed = list(entries)
        self.places = {
            full: _GrantOrder([(count, name) for count, name, is_full in listed if is_full is full])
            for full in (False, True)
        }

    def push(self, unfinished: int, name: str, *, full: bool) -> None:
        """Adds a worker."""
        heapq.heappush(self.places[full].entries, (unfinished, name))


def _first(queues: Iterable[_GrantQueue], *, full: bool) -> _GrantOrder | None:
    """Returns the places of which the first worker comes first; None if there is no worker."""
    found = [queue.places[full] for queue in queues if queue.places[full].entries]
    return min(found, key=lambda places: places.entries[0], default=None)


class Admission:
    """Grants credits; a pure function of the workers' loads.

    A worker that is not alive has no claim on groups that it never stored: its share goes to the
    others. If it returns, it may use its old credits, and fewer are granted until the surplus is
    used up.

    Example::

        admission = Admission(groups_per_step=8, max_staleness=2)
        credits = admission.grant({"w0": WorkerLoad(0, 0, 0, alive=True)})   # {"w0": 24}
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        self.limit = (max_staleness + 1) * groups_per_step
        self.share = 1.0
        """The share of the limit that one of several workers may hold, as its share of a step:
        otherwise its groups could fill the buffer and make no step."""

    def outstanding(self, workers: Mapping[str, WorkerLoad]) -> int:
        """The number of groups that are granted and not settled, over all workers."""
        return sum(
            (load.granted if load.alive else load.stored) - load.settled
            for load in workers.values()
        )

    def grant(
        self, workers: Mapping[str, WorkerLoad], *, free: int | None = None
    ) -> dict[str, int]:
        """Computes new cumulative credits for every worker, never fewer than before.

        Free places go one at a time to the living worker with the fewest unfinished groups.
        ``free`` is their number where another limit decides, such as that of
        `deltawire.rl.allocation.allocator`.
        """
        granted = {name: load.granted for name, load in workers.items()}
        alive = sorted(name for name, load in workers.items() if load.alive)
        proven = [name for name in alive if workers[name].proven]
        new = [name for name in alive if not workers[name].proven]
        most = math.ceil(self.limit * max(self.share, 1 / max(1, len(alive))))
        holds = {name: granted[name] - workers[name].settled for name in alive}
        allocated = free is not None
        if free is None:
            free = self.limit - self.outstanding(workers)
        held = sum(granted[name] - workers[name].stored for name in new)

        def queue(names: Sequence[str]) -> _GrantQueue:
            return _GrantQueue(
                (granted[name] - workers[name].stored, name, holds[name] >= most) for name in names
            )

        queues = [queue(proven), queue(new)]
        while free > 0:
            able = queues[:1] if proven and held >= self.limit // 2 else queues
            # Parts of a prompt that were granted again may exceed what prompts hold by design.
            chosen = _first(able, full=False) or (_first(able, full=True) if allocated else None)
            if chosen is None:
                break
            unfinished, name = chosen.pop()
            granted[name] += 1
            holds[name] += 1
            held += not workers[name].proven
            queues[not workers[name].proven].push(unfinished + 1, name, full=holds[name] >= most)
            free -= 1
        for name in new:
            if workers[name].trial:
                granted[name] = max(granted[name], workers[name].stored + 1)
        return granted
