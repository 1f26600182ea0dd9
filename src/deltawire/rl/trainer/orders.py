"""Orders that rank 0 of a trainer sends to the other ranks, one message after another.

::

    rank 0    Start ─▶ Train ─▶ Publish ─▶ Train ─▶ Publish ─▶ Save ─▶ … ─▶ End
    others    do the same, in the same order; Wait comes while rank 0 has nothing to train on

Of a run of several adapters each message names its line, and `StartLines` comes first.

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
    """End; ``save`` asks to commit what is under way, and ``checkpoint`` for a last one as well."""

    save: bool
    checkpoint: bool = True


Order = Start | Train | PublishShards | ReturnTo | Save | Measure | Wait | End


class StartLines(msgspec.Struct, frozen=True, kw_only=True, tag="start_lines"):
    """The first message of a run of several adapters, by its id. A `Start` of each line follows."""

    run: str
    public_key: str


class LineOrder(msgspec.Struct, frozen=True):
    """An order, and the line that it is for; ``line`` is empty in a run without lines."""

    line: str
    order: Order | StartLines


_decoder = msgspec.msgpack.Decoder(LineOrder)


class Orders:
    """Sends rank 0's orders. The leaders of a run's lines share one.

    Example::

        orders = Orders()
        orders.send(Wait())
        ...  # do what was ordered
        orders.arrived()
    """

    def __init__(self) -> None:
        self.in_step = True
        """True while all ranks wait for the next order."""

    def send(self, order: Order | StartLines, *, line: str = "") -> None:
        """Sends an order to all other ranks. It must succeed before the next one, because all ranks
        take orders in step."""
        self.in_step = False
        broadcast(msgspec.msgpack.encode(LineOrder(line, order)))

    def arrived(self) -> None:
        """Counts the last order as done."""
        self.in_step = True


def receive() -> LineOrder:
    """Returns the next order of rank 0; waits for it."""
    return _decoder.decode(broadcast())
