"""Runs parts of a publication on rank 0, so that no rank waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from deltawire.errors import DeltawireError
from deltawire.sync.publish.outage import Outage

T = TypeVar("T")


class RunWriter(Protocol):
    """Publishes the versions of one trainer's model; all ranks call each method together."""

    @property
    def version(self) -> int:
        """The newest committed version, -1 before the first; known on rank 0."""
        ...

    @property
    def outage(self) -> Outage | None:
        """The time without the store and its figures; None on ranks that publish nothing."""
        ...

    def publish(self, model: Any, metadata: dict[str, Any], *, unless_held: bool = False) -> bool:
        """Publishes the model's weights, which are committed in the background.

        With ``unless_held`` only if the newest version holds other bits. Returns False, on every
        rank, if the weights were left out because the store is away and an earlier version waits.
        """
        ...

    def close(self) -> None:
        """Waits for the version under way, raises what it failed with, and ends the threads."""
        ...


def rank_and_count() -> tuple[int, int]:
    """Returns this process's rank and how many there are: 0 and 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def on_rank_zero(act: Callable[[], T]) -> T:
    """Runs ``act`` on rank 0, and returns its result or raises its error on every rank.

    The result must be picklable. All ranks must call this together.
    """
    rank, ranks = rank_and_count()
    if ranks == 1:
        return act()
    told: list[Any] = [None]
    failed: DeltawireError | None = None
    if rank == 0:
        try:
            told[0] = (None, act())
        except DeltawireError as error:
            failed = error
            told[0] = (type(error), f"rank 0: {error}")
    dist.broadcast_object_list(told, src=0)
    if failed is not None:
        raise failed
    kind, found = told[0]
    if kind is not None:
        raise kind(found)
    result: T = found
    return result
