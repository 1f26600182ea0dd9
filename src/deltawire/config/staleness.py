"""Defines the section of the staleness policy."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from deltawire.config.base import Fraction, Section


class StalenessConfig(Section, frozen=True, kw_only=True):
    """The policy for groups that finish late (`deltawire.rl.control.staleness`).

    Example::

        [train]
        max_staleness = 2

        [train.staleness]
        policy = "windowed_fifo"
        window = 0.5
    """

    policy: Literal["strict", "windowed_fifo", "requeue"] = "strict"
    window: Fraction = 0.3
    """``windowed_fifo``: the share of the outstanding groups that may be overtaken."""
    requeue_share: Fraction = 0.25
    """``requeue``: largest share of a step that groups older than max_staleness may make up."""
    requeue_age: Annotated[int, Meta(ge=0, le=4096)] = 0
    """``requeue``: largest age of a group; 0 is four times max_staleness."""
