"""One rank's part of a trainer: its shards of the weights, and of what is published and saved.

Rank 0 leads (`deltawire.rl.trainer.leader`) and runs the same code as the others::

    rank 0     chooses groups ─▶ orders ─▶ Rank: train ─▶ publish ─▶ save        commits
    rank k                       orders ─▶ Rank: train ─▶ publish ─▶ save        uploads its part

A single process is rank 0 of one rank, and sends no orders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from deltawire.config.machine import machine_policy
from deltawire.errors import BugError, DeltawireError, FencedError, InputError, ResyncError
from deltawire.events import SourceLoss
from deltawire.export.merge import MergeReport, require_kept
from deltawire.rl.trainer.fencing import restartable, unfenced
from deltawire.rl.trainer.orders import (
    End,
    Measure,
    Order,
    PublishShards,
    ReturnTo,
    Save,
    Start,
    Train,
    Wait,
)
from deltawire.rl.trainer.resume import Restoration, Resumed
from deltawire.runtime.memory import release_heap
from deltawire.store import Bucket
from deltawire.sync import COMPACTION_STRIDES, AnchorStats, CommitStats
from deltawire.train.checkpoint import CheckpointWriter
from deltawire.train.masters import MasterWeights
from deltawire.train.parallel import TrainerMesh
from deltawire.train.parallel.ranks import lost_ranks
from deltawire.train.publications import Publications
from deltawire.train.publishing import open_rank_publisher
from deltawire.train.served_share import ServedShare
from deltawire.train.stopping import StepAbandonedError, Stopping, never
from deltawire.wire.decisions import ServedVersion
from deltawire.wire.ledger import STEP_RECORD, Ledger
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer

Losses = tuple[SourceLoss, dict[str, SourceLoss]]

R_co = TypeVar("R_co", covariant=True)
LongTask = Callable[[str], AbstractContextManager[None]]


class StepKind(Protocol[R_co]):
    """The kind of a trainer's steps: on groups of rollouts, or on documents."""

    def restore(self, model: Any, *, newest: int) -> Resumed:
        """Restore the newest checkpoint at or before a version; all ranks call this together."""
        ...

    def recompute(self, state: Resumed) -> bool:
        """Compute the next committed step again; returns whether it gave the published bits."""
        ...

    def train(
        self, masters: MasterWeights, order: Train, given: Any = None, *, stopping: Stopping
    ) -> R_co:
        """Compute a step. ``given`` is what rank 0 has read already. Raises `StepAbandonedError`
        on all ranks if one is ``stopping`` before the optimizer step."""
        ...

    def return_to(self, masters: MasterWeights, target: ServedVersion, *, now: int) -> Restoration:
        """Restore the masters, and if possible the optimizer, of a version before ``now``; all
        ranks call this together."""
        ...

    def measure(self, masters: MasterWeights) -> Losses:
        """Measure the loss on held-out data, in total and by source; all ranks call this together.
        Raises `BugError` for a kind of step that an evaluator measures."""
        ...


class Rank(Generic[R_co]):
    """Trains, publishes and saves what this rank holds. All ranks call each method together.

    ``long_task`` announces work that may take long, ``stopping`` returns whether this process was
    asked to stop, and ``confirm`` raises if another trainer has replaced this one.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        start: Start,
        model: Any,
        steps: StepKind[R_co],
        *,
        signer: Signer | None = None,
        on_commit: Callable[[CommitStats], None] | None = None,
        on_anchor: Callable[[AnchorStats], None] | None = None,
        confirm: Callable[[], None] = lambda: None,
        long_task: LongTask = lambda _: contextlib.nullcontext(),
        stopping: Stopping = never,
    ) -> None:
        self.bucket, self.run, self.config = bucket, run, start.config
        self.epoch, self.version = start.epoch, start.version
        self.steps = steps
        self.stop_asked = False
        self.merges: dict[int, MergeReport] = {}
        """Reports of versions that are not committed yet, by an exporter that merges."""
        self.shares: dict[int, ServedShare] = {}
        """The served shares of versions that are not committed yet."""
        self.recomputed = ""
        """Describes the steps that were recomputed after the checkpoint; empty if there were
        none."""
        self._confirm, self._stopping = confirm, stopping
        state = self._restore(model, long_task)
        self.masters, self.ledger = state.masters, state.ledger
        train = self.config.train
        self.publisher = open_rank_publisher(
            bucket,
            run,
            self.mesh,
            self.masters.shards,
            version=start.version,
            epoch=start.epoch,
            session=start.session,
            anchor_every=train.anchor_every,
            compaction_strides=COMPACTION_STRIDES if train.compaction else (),
            signer=signer,
            on_commit=on_commit,
            on_anchor=on_anchor,
            frozen=self.masters.frozen_names(),
            snapshot_dir=machine_policy().publisher_dir(train.publisher_offload),
        )
        self.further = Publications(
            bucket,
            run,
            self.masters.model,
            self.mesh,
            main=self.publisher,
            train=train,
            epoch=start.epoch,
            session=start.session,
            signer=signer,
        )
        self.checkpoints = CheckpointWriter(bucket, self.mesh, run=run.id, confirm=confirm)
        self._saved = -1
        release_heap()

    @property
    def mesh(self) -> TrainerMesh:
        """This rank among the others."""
        return self.masters.mesh

    def _restore(self, model: Any, long_task: LongTask) -> Resumed:
        """Restore the newest checkpoint, and recompute the steps from there to the head."""
        state = self.steps.restore(model, newest=self.version)
        first, same = state.version + 1, True
        while state.version < self.version:
            with long_task("recompute"):
                same = self.steps.recompute(state)
        state.follow_settings(self.config.train)
        self.diverged = not same
        if first <= self.version:
            self.recomputed = f"recomputed steps {first} to {self.version}, " + (
                "to the same bits"
                if same
                else f"to other bits{_other_ranks(state)}; the next delta carries them"
            )
        return state

    def train(self, order: Train, given: Any = None) -> R_co | None:
        """Compute a step, which changes this rank's shards; publishes nothing. Returns None if a
        rank was asked to stop before the optimizer step: then nothing changes, and all stop."""
        try:
            result = self.steps.train(self.masters, order, given, stopping=self._stopping)
        except StepAbandonedError:
            self.stop_asked = True
            return None
        release_heap()  # Of activations: publishing and the optimizer need other sizes.
        self.agree_to_stop()
        return result

    def return_to(self, target: ServedVersion) -> Restoration:
        """Restore this rank's shards of an earlier version; publishes nothing."""
        found = self.steps.return_to(self.masters, target, now=self.version)
        self.masters = found.masters
        self.agree_to_stop()
        return found

    def measure(self) -> Losses:
        """Measure the loss on held-out data, which changes nothing."""
        found = self.steps.measure(self.masters)
        self.agree_to_stop()
        return found

    def agree_to_stop(self) -> None:
        """Set ``stop_asked`` on all ranks once any of them was asked to stop."""
        self.stop_asked = bool(self.mesh.sum([float(self._stopping())])[0])

    def publish(self, version: int, metadata: Mapping[str, Any] | None = None) -> None:
        """Copy this rank's shards, and commit them in the background as ``version`` with those of
        the other ranks. Rank 0's ``metadata`` counts."""
        self._publish(version, metadata)
        release_heap()  # Of rounded weights, which the publisher has copied.

    def _publish(self, version: int, metadata: Mapping[str, Any] | None) -> None:
        if self.publisher.next_version != version:
            raise ResyncError(
                f"rank {self.mesh.rank} would publish version {self.publisher.next_version}, "
                f"rank 0 version {version}",
                hint="all ranks start again from the bucket",
                run=self.bucket.url,
                version=version,
            )
        trained = self.masters.trained()
        self._check_merge(version)
        if (share := self.masters.served_share()) is not None and self.mesh.leads:
            self.shares[version] = share
        records = dict(metadata or {})
        if STEP_RECORD in records and version % self.config.train.checkpoint_every == 0:
            records[STEP_RECORD] = records[STEP_RECORD] | {"state": self.masters.state_hash()}
        self.version = self.further.publish(
            lambda: self.publisher.publish(trained, partial=True, metadata=records)
        )
        self.diverged = False

    def _check_merge(self, version: int) -> None:
        """Keep the report of an exporter that merges; raises `InputError` if too little of the
        change is left when a checkpoint is due."""
        report = getattr(self.masters.source, "report", None)
        if report is None:
            return
        self.merges[version] = report
        train = self.config.train
        if version % train.checkpoint_every == 0:
            require_kept(report, train.adapter.merge_floor, what=f"version {version}")

    def save(self, ledger: Ledger) -> bool:
        """Store a checkpoint in the background; returns whether there was anything to store."""
        self.publisher.flush()
        self.further.flush()
        # A state with other weights than its version's cannot be resumed, and would replace one
        # that can.
        if self._saved == self.version or self.diverged:
            return False
        self._confirm()
        self.checkpoints.save(
            self.masters.state(),
            ledger,
            version=self.version,
            digest=self.publisher.digest.hex(),
            keep=self.config.retain.checkpoints,
        )
        self._saved = self.version
        return True

    def finish(self, ledger: Ledger, *, checkpoint: bool = True) -> None:
        """Commit and save the current version, and check that the weights are those published."""
        self.further.flush()
        self.further.close()
        self.publisher.close()
        if (
            checkpoint and self.version
        ):  # Version 0 is its own checkpoint: all that belongs to it follows from it.
            self.save(ledger)
        self.checkpoints.close()
        if self.masters.digest() != self.publisher.digest and not self.diverged:
            raise BugError("the trainer's weights are not what it published", run=self.bucket.url)

    def close(self) -> None:
        """End the threads, also those that an error left running."""
        # An error of the version under way was raised before, or follows the one that ends the run.
        self.further.__exit__(None, None, None)  # They read the publisher's copies.
        with contextlib.suppress(DeltawireError):
            self.publisher.close()
        with contextlib.suppress(DeltawireError):
            self.checkpoints.close()

    def follow(self, order: Order) -> bool:
        """Obey an order of rank 0; returns whether more will come."""
        match order:
            case Train():
                self.train(order)
            case PublishShards():
                self.publish(order.version)
            case ReturnTo():
                self.return_to(order.target)
            case Save():
                self.save(Ledger())
            case Measure():
                self.measure()
            case Wait():
                self.agree_to_stop()
            case End():
                if order.save:
                    self.finish(Ledger(), checkpoint=order.checkpoint)
                self.close()
            case Start():
                raise BugError("rank 0 started twice", run=self.bucket.url)
        return not isinstance(order, End)


@contextlib.contextmanager
def translated(bucket: Bucket, run: Run, epoch: int) -> Iterator[None]:
    """Translates errors of the body to what the supervisor should do next; see `fencing`."""
    try:
        with lost_ranks():
            yield
    except FencedError as error:
        raise unfenced(bucket, run, epoch, error) from error
    except InputError as error:
        raise restartable(error) from error


def _other_ranks(state: Resumed) -> str:
    """Describes a change in the number of ranks since the earlier steps; empty if there is none."""
    now, before = state.masters.mesh.ranks, state.ranks
    return f" ({now} ranks now, {before} before)" if before not in (None, now) else ""
