"""Decides if a run's end stores the trainer's state (``train.final_checkpoint``)."""

from __future__ import annotations

from deltawire.config.live import LiveConfig
from deltawire.config.sections import RunConfig

SMALL_BYTES = 256 << 20
"""The end of a short run stores a state of at most this size without being asked."""


def stores_last_state(config: RunConfig, version: int, size: int) -> bool:
    """Returns whether a run that completes at ``version`` stores its state of ``size`` bytes."""
    train = config.train
    if train.final_checkpoint != "auto":
        return train.final_checkpoint == "always"
    # Steps on users' answers cannot be computed again once a user has been erased.
    # A stop rule's end is early: with a later limit, the same command continues the run.
    if config.live != LiveConfig() or version >= train.checkpoint_every or version < train.versions:
        return True
    return size <= SMALL_BYTES
