"""Rank 0 of a trainer: decides what is trained on, orders it, and keeps the run's status.

`deltawire.rl.trainer.trainer` and `deltawire.rl.trainer.midtraining` say what a step is.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec
from torch import Tensor

from deltawire.config import RunConfig
from deltawire.config.checkpoints import stores_last_state
from deltawire.errors import InputError
from deltawire.events import MergeKept, Published, Served
from deltawire.export.merge import MergeReport
from deltawire.rl.allocation.allocator import Allocator
from deltawire.rl.control.credits import CreditIssuer
from deltawire.rl.control.draws import DrawBook
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.rl.trainer.orders import (
    End,
    Measure,
    Order,
    Orders,
    PublishShards,
    ReturnTo,
    Save,
    Start,
    Train,
    Wait,
)
from deltawire.rl.trainer.rank import Losses, Rank, StepKind
from deltawire.rl.trainer.resume import Restoration
from deltawire.rl.trainer.settings import announce_settings
from deltawire.rl.trainer.version_retention import VersionRetention
from deltawire.runtime.fleet import known_trainer, next_epoch
from deltawire.runtime.process import Process
from deltawire.sync import AnchorStats, CommitStats, Publisher, ShardPublisher, newest_readable
from deltawire.train.masters import MasterWeights
from deltawire.train.served_share import ServedShare
from deltawire.wire.decisions import RestoreRecord, ServedVersion
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer
from deltawire.wire.status import TrainerStatus

R = TypeVar("R")

WAIT_S = 30.0
"""The other ranks hear from rank 0 at least this often while there is nothing to train on."""

EVENTS_KEPT = 256
"""An anchor that follows its version by more than this many versions is not reported."""

MERGED_LAYERS = 64
"""Layers of which an event states what a merge kept, or the served share."""


class Leader(Generic[R]):
    """Orders steps and publishes them; subclasses choose what is trained on.

    ``before`` is the status of an earlier trainer of the run, ``ledger`` what its state has
    consumed; leaders of several lines share ``orders``. Raises `InputError` if the run has no
    version 0.
    """

    credits: CreditIssuer

    def __init__(
        self,
        process: Process,
        run: Run,
        config: RunConfig,
        model: Any,
        steps: StepKind[R],
        *,
        signer: Signer | None = None,
        orders: Orders | None = None,
    ) -> None:
        self.process, self.bucket, self.run, self.config = process, process.bucket, run, config
        head = newest_readable(self.bucket, run)
        if head is None:
            raise InputError(
                "the run has no version 0",
                hint="start it with deltawire run",
                run=self.bucket.url,
            )
        self.before: TrainerStatus | None = known_trainer(self.bucket)
        self.epoch = next_epoch(self.bucket, run, head.version)
        self.version = head.version
        self.settings = announce_settings(process, run, config)
        start = Start(
            run=run.id,
            public_key=run.public_key,
            config=config,
            version=head.version,
            epoch=self.epoch,
            session=secrets.token_hex(12),
        )
        self._published: dict[int, Published] = {}
        """The events of the newest versions, to be repeated with the bytes of their anchors."""
        self._orders = orders or Orders()
        self._line = config.line.name if config.line else ""
        self._ended = False
        self._order(start)
        self.rank: Rank[R] = Rank(
            self.bucket,
            run,
            start,
            model,
            steps,
            signer=signer,
            on_commit=self._on_commit,
            on_anchor=self._on_anchor,
            confirm=process.lease.confirm,
            long_task=process.heartbeat.long_task,
            stopping=process.is_stopping,
        )
        self._orders.arrived()
        if self.rank.recomputed:
            process.record_life("started", self.rank.recomputed)
        self.version_retention = VersionRetention(
            self.bucket,
            run,
            keep=config.retain.versions,
            report=self._report,
            signer=signer,
            lines=[(one.bucket, one.run) for one in self.rank.further.by_name.values()],
        )
        process.heartbeat.alarm = lambda: self.version_retention.alarm

    def _open_credits(
        self,
        ledger: Ledger,
        granted: Mapping[str, int],
        draws: DrawBook | None = None,
        allocator: Allocator[BufferedGroup] | None = None,
    ) -> CreditIssuer:
        """Make what grants credits and writes the trainer's status."""
        credits_ = CreditIssuer(
            self.bucket,
            self.config,
            ledger,
            epoch=self.epoch,
            granted=dict(granted),
            confirm=self.process.lease.confirm,
            settings=self.settings,
            draws=draws,
            allocator=allocator,
        )
        credits_.version, credits_.digest = self.version, self.publisher.digest.hex()
        return credits_

    @property
    def masters(self) -> MasterWeights:
        """Rank 0's shards of the weights."""
        return self.rank.masters

    @property
    def publisher(self) -> Publisher | ShardPublisher:
        """Commits versions."""
        return self.rank.publisher

    def _report(self, fault: str) -> None:
        """Record a fault that does not end the run."""
        self.process.record_life("started", fault)

    def _on_commit(self, receipt: CommitStats) -> None:
        """Called by the publisher's thread."""
        self.credits.committed(receipt.version, receipt.digest)
        merge = self.rank.merges.pop(receipt.version, None)
        event = Published(
            process=self.process.name,
            at=time.time(),
            version=receipt.version,
            bytes_delta=receipt.bytes_delta,
            bytes_full=receipt.bytes_full,
            bytes_anchor=receipt.bytes_anchor,
            changed=receipt.changed,
            elements=receipt.elements,
            blocked_ms=receipt.blocked_ms,
            encode_ms=receipt.encode_ms,
            upload_ms=receipt.upload_ms,
            merge=None if merge is None else _kept(merge),
            bytes_reused=receipt.bytes_reused,
            served=_served(self.rank.shares.pop(receipt.version, None)),
        )
        self._published[receipt.version] = event
        self._published.pop(receipt.version - EVENTS_KEPT, None)
        self.process.events.record(event)

    def _on_anchor(self, anchor: AnchorStats) -> None:
        """Called by the publisher's anchor thread."""
        event = self._published.get(anchor.version)
        if anchor.error:
            self._report(f"version {anchor.version} has no anchor yet: {anchor.error}")
        elif event is not None:
            self.process.events.record(
                msgspec.structs.replace(
                    event, bytes_anchor=anchor.bytes_anchor, bytes_reused=anchor.bytes_reused
                )
            )

    def _order(self, order: Order) -> None:
        """Tell the other ranks this one's next action."""
        self._ordered_at = time.monotonic()
        self._orders.send(order, line=self._line)

    def _train(self, order: Train, given: Any = None) -> R | None:
        """Compute a step on all ranks; returns None if it was abandoned, to stop."""
        with self.process.heartbeat.long_task("train"):
            self._order(order)
            result = self.rank.train(order, given)
        self._arrived()
        return result

    def _publish(self, metadata: CommitMetadata, restore: RestoreRecord | None = None) -> None:
        """Publish what the step computed, or a ``restore`` set, on all ranks."""
        version = metadata.step
        records = metadata.to_dict() | (restore.to_dict() if restore else {})
        self.credits.expect(version, metadata)
        with self.process.heartbeat.long_task("publish"):
            self._order(PublishShards(version=version))
            self.rank.publish(version, records)
        self._arrived()
        self.version = self.rank.version
        self.process.heartbeat.count_finished()

    def _return_to(self, target: ServedVersion) -> Restoration:
        """Restore an earlier version's masters on all ranks."""
        with self.process.heartbeat.long_task("train"):
            self._order(ReturnTo(target=target))
            found = self.rank.return_to(target)
        self._arrived()
        return found

    def _measure(self) -> Losses:
        """Measure the loss on held-out data, on all ranks."""
        with self.process.heartbeat.long_task("evaluate"):
            self._order(Measure())
            found = self.rank.measure()
        self._arrived()
        return found

    def _save(self, ledger: Ledger) -> bool:
        """Store a checkpoint on all ranks; returns whether there was anything to store."""
        with self.process.heartbeat.long_task("checkpoint"):
            self._order(Save())
            saved = self.rank.save(ledger)
        self._arrived()
        return saved

    def _arrived(self) -> None:
        self._orders.arrived()
        if self.rank.stop_asked:
            self.process.stop()

    def keep_waiting(self) -> None:
        """Tell the other ranks that there is nothing to train on yet; raise the error of a version
        that was not committed, whose groups would hold their credits forever.
        """
        self.publisher.raise_failure()
        if self.rank.mesh.ranks > 1 and time.monotonic() - self._ordered_at >= WAIT_S:
            self._order(Wait())
            self.rank.agree_to_stop()
            self._arrived()

    def _finish_ranks(self, ledger: Ledger) -> None:
        """Commit and save what is under way, on all ranks, and end the others."""
        self._ended = True
        checkpoint = self._needs_last_checkpoint()
        self._order(End(save=True, checkpoint=checkpoint))
        self.rank.finish(ledger, checkpoint=checkpoint)
        self._orders.arrived()

    def _needs_last_checkpoint(self) -> bool:
        """Return whether the state is stored at this end. A run that was asked to stop is about
        to be continued."""
        size = _bytes_of(self.masters.state())
        return not self.is_complete or stores_last_state(self.config, self.version, size)

    @property
    def is_complete(self) -> bool:
        """Return whether the last version is made."""
        return self.version >= self.config.train.versions

    def _write_last_status(self) -> None:
        self.credits.write("finished" if self.is_complete else "stopped")

    def close(self) -> None:
        """End all threads, also those that an error left running, and the other ranks."""
        if self._orders.in_step and not self._ended:
            self._ended = True
            self._order(End(save=False))
            self._orders.arrived()
        self.rank.close()
        self.version_retention.close()


def _bytes_of(state: Mapping[str, Tensor]) -> int:
    """The bytes of a state, of all ranks together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _served(share: ServedShare | None) -> Served | None:
    """The event's part of a served share: all layers together, and those that it is least of."""
    if share is None:
        return None
    least = sorted(share.layers.items(), key=lambda one: one[1])[:MERGED_LAYERS]
    return Served(since=share.since, share=share.share, layers=dict(least))


def _kept(report: MergeReport) -> MergeKept:
    """The event's part of a merge: all layers together, and those that kept least."""
    return MergeKept(
        kept=report.total.kept,
        changed=report.total.changed,
        layers={one.name: one.kept for one in report.worst(MERGED_LAYERS)},
    )
