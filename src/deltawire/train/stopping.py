"""Ends a step early when its process is asked to stop.

A step of a pretrained model takes a minute. Its groups stay in the bucket until a version names
them, so the next trainer takes the same step: nothing is lost but time.
"""

from __future__ import annotations

from collections.abc import Callable

from deltawire.train.parallel import TrainerMesh

Stopping = Callable[[], bool]
"""Returns whether this process was asked to stop."""


class StepAbandonedError(Exception):
    """The process was asked to stop before the optimizer step; only gradients have changed."""


def never() -> bool:
    """Is the `Stopping` of steps that are always completed."""
    return False


def abandon_if(stopping: Stopping, mesh: TrainerMesh) -> None:
    """Raises `StepAbandonedError` on all ranks if any of them was asked to stop.

    All ranks call this together, between two micro-batches.
    """
    if stopping is not never and mesh.sum([float(stopping())])[0]:
        raise StepAbandonedError
