"""Credits: how many groups workers may start, so that none comes too late to be trained on.

The trainer at committed version v lets at most (S+1)·B groups be outstanding, where B groups make
a step and S is the staleness bound. Outstanding is every group that was granted and is not yet
settled; a group settles when the version that consumed it is committed, or when it is dropped.

Bound. A worker starts a group only while it holds at least the version stated beside the credit.
Let a group be granted at committed version v. Less than (S+1)·B groups are unsettled ahead of it.
If the trainer consumes in the order of granting, those make at most S steps before the one that
takes it: the first from v at the earliest, so it is consumed from version v+S at the latest. Its
oldest token was drawn at v or later, so its staleness is at most S. With S = 0 nothing is granted
between a step's groups and its commit: sampling and training alternate strictly.

Workers finish out of order, so the argument bounds the aggregate; the trainer takes the oldest
groups first and drops what still exceeds S (`deltawire.rl.control.rollout_buffer`), so the bound
holds for each group by enforcement and drops stay rare by admission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerLoad:
    """A worker as the trainer sees it: cumulative counts of groups granted, stored and settled."""

    granted: int
    stored: int
    settled: int
    alive: bool


class Admission:
    """Grants credits; a pure function of what it is shown.

    A worker that is not alive holds no claim on the groups it never stored: its share goes to the
    others. Should it come back, it may use its old credits, and the surplus is made up by granting
    less until it is worked off.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        self.limit = (max_staleness + 1) * groups_per_step

    def outstanding(self, workers: Mapping[str, WorkerLoad]) -> int:
        """Granted and not settled, over all workers."""
        return sum(
            (load.granted if load.alive else load.stored) - load.settled
            for load in workers.values()
        )

    def grant(self, workers: Mapping[str, WorkerLoad]) -> dict[str, int]:
        """New cumulative credits for every worker: never fewer than before.

        Free places go one at a time to the living worker with the fewest unfinished groups.
        """
        granted = {name: load.granted for name, load in workers.items()}
        alive = sorted(name for name, load in workers.items() if load.alive)
        free = self.limit - self.outstanding(workers)
        while alive and free > 0:
            name = min(alive, key=lambda worker: granted[worker] - workers[worker].stored)
            granted[name] += 1
            free -= 1
        return granted
