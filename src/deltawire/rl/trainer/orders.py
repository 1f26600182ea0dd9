"""Orders that rank 0 of a trainer sends to the other ranks, one message after another.

::

    rank 0    Start ─▶ Train ─▶ Publish ─▶ Train ─▶ Publish ─▶ Save ─▶ … ─▶ End
    others    do the same, in the same order; Wait comes while rank 0 has nothing to train on

A message goes over the trainer's process group, so the ranks act in step with each other. A rank
that fails sends nothing: its connections close, and that ends the others
(`deltawire.train.parallel.ranks.lost_ranks`).
"""

from __future__ import annotations

import msgspec

from deltawire.config import RunConfig
from deltawire.train.parallel.ranks import broadcast
from deltawire.wire.decisions import ServedVersion
from deltawire.wire.ledger import CommitMetadata


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The common start of all ranks: the run's id, the configuration with the settings that rank 0
    announced, the newest version, and the publishers' epoch and session."""

    run: str
    public_key: str
    config: RunConfig
    version: int
    epoch: int
    session: str


class Train(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """Compute the step that ``metadata`` describes, from the weights of version ``base``."""

    base: int
    metadata: CommitMetadata


class PublishShards(msgspec.Struct, frozen=True, kw_only=True, tag="publish"):
    """Publish the weights as ``version``."""

    version: int


class ReturnTo(msgspec.Struct, frozen=True, kw_only=True, tag="return_to"):
    """Restore the masters of an earlier version, which was rolled back to."""

    target: ServedVersion


class Save(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """Store a checkpoint of the version that was published last."""


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Measure the loss on held-out documents."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Nothing to do yet: rank 0 is alive."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End; ``save`` asks for a last checkpoint."""

    save: bool


Order = Start | Train | PublishShards | ReturnTo | Save | Measure | Wait | End

_decoder = msgspec.msgpack.Decoder(Order)


def send(order: Order) -> None:
    """Send an order from rank 0 to all others."""
    broadcast(msgspec.msgpack.encode(order))


def receive() -> Order:
    """The next order of rank 0; waits for it."""
    order: Order = _decoder.decode(broadcast())
    return order
