"""Checks that a trainer's frozen weights are those that its run states."""

from __future__ import annotations

from deltawire.store import Bucket
from deltawire.sync.chain.base_statement import held_tensors, read_base
from deltawire.train.masters import MasterWeights
from deltawire.wire.run import Run


def check_frozen_base(bucket: Bucket, run: Run, masters: MasterWeights) -> None:
    """Raises `InputError` if the frozen weights are not those that the run states. All ranks call
    this together."""
    statement = read_base(bucket, run)
    if statement is not None:
        names = {one.name for one in statement.tensors}
        held = held_tensors(masters.source.specs(), masters.digests(names))
        statement.check(held, who="trainer", run=bucket.url)
