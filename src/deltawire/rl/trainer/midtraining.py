"""The trainer process of a mid-training run: next-token steps, published as in reinforcement
learning.

It has the optimizer, the publisher, the checkpoints and the status of `Trainer`, and no workers. A
version's commit metadata holds the data's position after its step. A trainer that dies continues
from its last checkpoint: it computes the steps after that again from the same documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.errors import BugError, CorruptError
from deltawire.events import HeldoutLoss, Step, known
from deltawire.export.models import fetch_model_files, load_tokenizer
from deltawire.rl.trainer.leader import Leader
from deltawire.rl.trainer.orders import Train
from deltawire.rl.trainer.rank import Losses
from deltawire.rl.trainer.resume import (
    Restoration,
    Resumed,
    metadata_at,
    next_committed,
    resume,
    settings_of_step,
    threads_of,
)
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process
from deltawire.store import Bucket
from deltawire.train.masters import MasterWeights
from deltawire.train.midtrain import (
    DocumentBatch,
    DocumentStream,
    HeldoutDocuments,
    MidtrainResult,
    midtrain_step,
    seed_document_step,
)
from deltawire.train.stopping import Stopping, never
from deltawire.wire.decisions import ServedVersion
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer

REPEAT_S = 60.0
"""How often the newest held-out losses are recorded again."""


class DocumentSteps:
    """Steps on documents; ``position`` is that of the next one. See
    `deltawire.rl.trainer.rank.StepKind`."""

    def __init__(self, bucket: Bucket, run: Run, config: RunConfig) -> None:
        assert config.midtrain is not None
        self._bucket, self._run, self._config = bucket, run, config
        with fetch_model_files(bucket, run) as folder:
            text = Text(load_tokenizer(Path(folder)))
        self._stream = DocumentStream(config.midtrain, text, seed=config.seed)
        self.heldout = HeldoutDocuments(config, text)
        self.position = 0

    def next_batch(self) -> DocumentBatch:
        """The documents of the next step."""
        return self._stream.batch(self.position)

    def restore(self, model: Any, *, newest: int) -> Resumed:
        """See `StepKind.restore`."""
        state = resume(self._bucket, self._run, self._config, model, newest=newest)
        if state.version:
            self.position = metadata_at(self._bucket, self._run, state.version)[0].position
        return state

    def recompute(self, state: Resumed) -> bool:
        """See `StepKind.recompute`."""
        version = next_committed(self._bucket, self._run, state.version)
        if version is None:
            raise CorruptError("no version builds on this one", version=state.version)
        metadata, published = metadata_at(self._bucket, self._run, version)
        config = settings_of_step(self._bucket, self._run, metadata, version)
        state.follow_settings(config.train)
        with threads_of(metadata):
            self._train(state.masters, config, metadata, None, never)
        state.version, state.ranks = version, metadata.ranks or state.ranks
        return state.masters.digest() == published

    def train(
        self,
        masters: MasterWeights,
        order: Train,
        given: DocumentBatch | None = None,
        *,
        stopping: Stopping,
    ) -> MidtrainResult:
        """See `StepKind.train`; ``given`` is the batch of `next_batch`."""
        return self._train(masters, self._config, order.metadata, given, stopping)

    def return_to(self, masters: MasterWeights, target: ServedVersion, *, now: int) -> Restoration:
        """See `StepKind.return_to`; mid-training follows no decisions."""
        del masters, now
        raise BugError(f"mid-training was told to return to version {target.version}")

    def measure(self, masters: MasterWeights) -> Losses:
        """See `StepKind.measure`."""
        return self.heldout.losses(masters)

    def _train(
        self,
        masters: MasterWeights,
        config: RunConfig,
        metadata: CommitMetadata,
        given: DocumentBatch | None,
        stopping: Stopping,
    ) -> MidtrainResult:
        batch = given or self.next_batch()
        if batch.position != metadata.position:
            raise CorruptError(
                "the documents of midtrain.streams are not those that were trained on",
                hint="restore the data, on every machine; or start a new run from the last version",
                run=self._bucket.url,
                version=metadata.step,
            )
        seed_document_step(config, self.position, rank=masters.mesh.data_rank)
        result = midtrain_step(masters, batch.documents, config, stopping=stopping)
        self.position = batch.position
        return result


class Midtrainer(Leader[MidtrainResult]):
    """Makes a version of every step of documents."""

    def __init__(
        self,
        process: Process,
        run: Run,
        config: RunConfig,
        model: Any,
        *,
        signer: Signer | None = None,
    ) -> None:
        self._steps = DocumentSteps(process.bucket, run, config)
        super().__init__(process, run, config, model, self._steps, signer=signer)
        self.credits = self._open_credits(Ledger(), {})
        self._measured = self._known_losses()
        self._repeated_at = 0.0

    def loop(self) -> None:
        """Train until the last version, or until asked to stop."""
        try:
            self.credits.write("training")
            if self._measured is None or self._measured.version != self.version:
                self._measure_if_due()
            while self.version < self.config.train.versions and not self.process.stopping:
                self._step()
            self._finish()
        finally:
            self.close()

    def _step(self) -> None:
        events = self.process.events
        started = events.now()
        self.process.heartbeat.progress("train")
        batch = self._steps.next_batch()
        metadata = CommitMetadata(
            step=self.publisher.next_version,
            threads=torch.get_num_threads(),
            settings=self.settings,
            position=batch.position,
            ranks=self.rank.mesh.ranks,
        )
        order = Train(base=self.version, metadata=metadata)
        result = self._train(order, batch)
        if result is None:
            return  # It was asked to stop.
        trained = events.span("train", started)
        self._publish(order.metadata)
        done = events.span("publish", trained)
        self._record(batch, result, at=done, seconds=trained - started)
        self._repeat_losses()
        self._measure_if_due()
        if self.version % self.config.train.checkpoint_every == 0:
            started = events.now()
            self._checkpoint()
            events.span("checkpoint", started)

    def _known_losses(self) -> HeldoutLoss | None:
        """The newest held-out losses that an earlier life of this trainer has measured, at a
        version that is committed."""
        found = [
            event
            for event in events_of(self.bucket, self.process.name)
            if isinstance(event, HeldoutLoss) and event.version <= self.version
        ]
        return max(found, key=lambda event: (event.version, event.at), default=None)

    def _measure_if_due(self) -> None:
        """Measure the current version's held-out loss if it is due, and store it before the next
        version exists: a version that is due and has a successor has been measured."""
        events = self.process.events
        if not self._steps.heldout.due(self.version):
            return
        started = events.now()
        total, sources = self._measure()
        done = events.span("evaluate", started)
        self._measured = HeldoutLoss(
            process=self.process.name,
            at=done,
            version=self.version,
            total=total,
            sources=sources,
            seconds=done - started,
        )
        self._repeated_at = done
        events.record(self._measured)
        events.flush()

    def _repeat_losses(self) -> None:
        """Record the newest held-out losses again from time to time: some readers read only the
        last minutes of events."""
        now = self.process.events.now()
        if self._measured is not None and now - self._repeated_at >= REPEAT_S:
            self._repeated_at = now
            self.process.events.record(self._measured)

    def _record(
        self, batch: DocumentBatch, result: MidtrainResult, *, at: float, seconds: float
    ) -> None:
        self.process.events.record(
            Step(
                process=self.process.name,
                at=at,
                version=self.version,
                groups=len(batch.documents),
                dropped=0,
                reward_mean=0.0,
                loss=known(result.loss),
                grad_norm=known(result.grad_norm),
                k3=0.0,
                ratio_max=1.0,
                clipped=0.0,
                staleness=[],
                tokens=result.tokens,
                seconds=seconds,
                entropy=known(result.entropy),
                completion_length=batch.tokens / len(batch.documents),
            )
        )

    def _checkpoint(self) -> None:
        if self._save(Ledger()):
            self.version_retention.start(newest=self.version)

    def _finish(self) -> None:
        with self.process.heartbeat.long_task("finish"):
            self._finish_ranks(Ledger())
        self._write_last_status()
