"""Steps on groups of rollouts: the part that every rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deltawire.config import RunConfig
from deltawire.errors import BugError
from deltawire.rl.control.rollout_buffer import BufferedGroup, read_consumed
from deltawire.rl.reference.reader import ReferenceReader
from deltawire.rl.trainer.orders import Train
from deltawire.rl.trainer.planted import plant
from deltawire.rl.trainer.rank import Losses
from deltawire.rl.trainer.resume import (
    Restoration,
    Resumed,
    recompute_step,
    reference_for,
    restore_version,
    resume,
    seed_step,
    skip_withdrawn,
)
from deltawire.rl.trainer.settings import config_of_step
from deltawire.store import Bucket
from deltawire.train.masters import MasterWeights
from deltawire.train.reference import Reference
from deltawire.train.step import StepResult, train_step
from deltawire.train.stopping import Stopping
from deltawire.wire.decisions import ServedVersion
from deltawire.wire.ledger import Ledger
from deltawire.wire.run import Run


class GroupSteps:
    """See `deltawire.rl.trainer.rank.StepKind`."""

    def __init__(self, bucket: Bucket, run: Run, config: RunConfig) -> None:
        self._bucket, self._run, self._config = bucket, run, config
        self.reference: Reference | ReferenceReader | None = None
        """The reference of ``train.loss.kl``; None without a penalty."""

    def restore(self, model: Any, *, newest: int) -> Resumed:
        """See `StepKind.restore`."""
        state = resume(self._bucket, self._run, self._config, model, newest=newest)
        self.reference = state.reference
        skip_withdrawn(self._bucket, self._run, state, newest=newest)
        return state

    def return_to(self, masters: MasterWeights, target: ServedVersion, *, now: int) -> Restoration:
        """See `StepKind.return_to`."""
        before = Resumed(masters, Ledger(), now, self._config.train, self.reference)
        return restore_version(self._bucket, self._run, self._config, before, target)

    def recompute(self, state: Resumed) -> bool:
        """See `StepKind.recompute`."""
        return recompute_step(self._bucket, self._run, state).equal

    def train(
        self,
        masters: MasterWeights,
        order: Train,
        given: Sequence[BufferedGroup] | None = None,
        *,
        stopping: Stopping,
    ) -> StepResult:
        """See `StepKind.train`; ``given`` are the groups that the metadata names.

        Raises `CorruptError` if a group, or what a reference process wrote of it, is gone.
        """
        groups = read_consumed(self._bucket, order.metadata) if given is None else given
        seed_step(self._config, order.metadata.step, rank=masters.mesh.data_rank)
        result = train_step(
            masters,
            [one.group for one in groups],
            config_of_step(self._config, order.metadata.settings),
            reference=reference_for(self.reference, groups),
            version=order.base,
            parts=order.metadata.parts,
            stopping=stopping,
        )
        if self._config.live.planted:
            plant(masters, self._config, version=order.metadata.step)
        return result

    def measure(self, masters: MasterWeights) -> Losses:
        """See `StepKind.measure`; an evaluator measures what is held out."""
        del masters
        raise BugError("a trainer on rollouts was asked for a loss on documents")
