"""The trainer process of a mid-training run: next-token steps, published as in reinforcement
learning.

It has the optimizer, the publisher, the checkpoints and the status of `Trainer`, and no workers. A
version's commit metadata holds the data's position after its step. A trainer that dies continues
from its last checkpoint: it computes the steps after that again from the same documents.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch

from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.errors import BugError, CorruptError, DeltawireError, FencedError, InputError
from deltawire.events import Published, Step, known
from deltawire.export.models import fetch_model_files, load_tokenizer
from deltawire.export.source import digest_of
from deltawire.rl.control.credits import CreditIssuer
from deltawire.rl.trainer.fencing import unfenced
from deltawire.rl.trainer.resume import (
    Resumed,
    metadata_at,
    next_committed,
    resume,
    settings_of_step,
)
from deltawire.rl.trainer.settings import announce_settings
from deltawire.rl.trainer.version_retention import VersionRetention
from deltawire.runtime.fleet import next_epoch
from deltawire.runtime.process import Process
from deltawire.sync import (
    COMPACTION_STRIDES,
    CommitStats,
    Mirror,
    Publisher,
    load_mirror,
)
from deltawire.train.checkpoint import save_checkpoint
from deltawire.train.masters import MasterWeights
from deltawire.train.midtrain import (
    DocumentBatch,
    DocumentStream,
    MidtrainResult,
    midtrain_step,
    seed_document_step,
)
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer


class Midtrainer:
    """Makes a version of every step of documents; ``position`` is that of the next document."""

    def __init__(
        self,
        process: Process,
        run: Run,
        config: RunConfig,
        model: Any,
        *,
        signer: Signer | None = None,
    ) -> None:
        assert config.midtrain is not None
        self.process, self.bucket, self.run, self.config = process, process.bucket, run, config
        head = load_mirror(self.bucket, run)
        if head is None:
            raise InputError("the run has no version 0", run=self.bucket.url)
        self.epoch = next_epoch(self.bucket, run, head.version)
        self.version = head.version
        with fetch_model_files(self.bucket, run) as folder:
            text = Text(load_tokenizer(Path(folder)))
        self.stream = DocumentStream(config.midtrain, text, seed=config.seed)
        self.settings = announce_settings(process, run, config)
        self.masters = self._restore(model, head)
        self.credits = CreditIssuer(
            self.bucket,
            config,
            Ledger(),
            epoch=self.epoch,
            granted={},
            confirm=process.lease.confirm,
            settings=self.settings,
        )
        self.credits.version, self.credits.digest = head.version, head.digest.hex()
        self.version_retention = VersionRetention(
            self.bucket,
            run,
            keep=config.retain.versions,
            report=lambda fault: process.record_life("started", fault),
            signer=signer,
        )
        self.publisher = Publisher(
            self.bucket,
            run,
            head,
            epoch=self.epoch,
            anchor_every=config.train.anchor_every,
            compaction_strides=COMPACTION_STRIDES if config.train.compaction else (),
            on_commit=self._on_commit,
            signer=signer,
        )
        self._saved = -1

    def _restore(self, model: Any, head: Mirror) -> MasterWeights:
        """Restore the newest checkpoint, and compute the steps from there to the head again."""
        state = resume(self.bucket, self.run, self.config, model, newest=head.version)
        self.position, start = self._position_at(state.version), state.version
        same = True
        while state.version < head.version:
            with self.process.heartbeat.long_task("recompute"):
                same = self._recompute(state)
        if start < head.version:
            self.process.record_life(
                "started",
                f"recomputed steps {start + 1} to {head.version}, "
                + ("to the same bits" if same else "to other bits; the next delta carries them"),
            )
        state.follow_settings(self.config.train)
        self._diverged = not same
        return state.masters

    def _position_at(self, version: int) -> int:
        return metadata_at(self.bucket, self.run, version)[0].position if version else 0

    def _recompute(self, state: Resumed) -> bool:
        """Compute one committed step again; returns whether it gave the published bits."""
        version = next_committed(self.bucket, self.run, state.version)
        if version is None:
            raise CorruptError("no version builds on this one", version=state.version)
        metadata, published = metadata_at(self.bucket, self.run, version)
        batch = self.stream.batch(self.position)
        if batch.position != metadata.position:
            raise CorruptError(
                "the documents of midtrain.streams are not those that were trained on",
                hint="restore the data, or start a new run from the last version",
                run=self.bucket.url,
                version=version,
            )
        config = settings_of_step(self.bucket, self.run, metadata, version)
        state.follow_settings(config.train)
        threads = torch.get_num_threads()
        torch.set_num_threads(metadata.threads or threads)
        try:
            seed_document_step(config, self.position)
            midtrain_step(state.masters, batch.documents, config)
        finally:
            torch.set_num_threads(threads)
        state.version, self.position = version, batch.position
        return digest_of(state.masters.source) == published

    def _on_commit(self, receipt: CommitStats) -> None:
        self.credits.committed(receipt.version, receipt.digest)
        self.process.events.record(
            Published(
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
            )
        )

    def loop(self) -> None:
        """Train until the last version, or until asked to stop."""
        try:
            self.credits.write("training")
            while self.version < self.config.train.versions and not self.process.stopping:
                self._step()
            self._finish()
        finally:
            with contextlib.suppress(DeltawireError):
                self.publisher.close()
            self.version_retention.close()

    def _step(self) -> None:
        events = self.process.events
        started = events.now()
        self.process.heartbeat.progress("train")
        batch = self.stream.batch(self.position)
        version = self.publisher.next_version
        with self.process.heartbeat.long_task("train"):
            seed_document_step(self.config, self.position)
            result = midtrain_step(self.masters, batch.documents, self.config)
        trained = events.span("train", started)
        metadata = CommitMetadata(
            step=version,
            threads=torch.get_num_threads(),
            settings=self.settings,
            position=batch.position,
        )
        self.credits.expect(version, metadata)
        with self.process.heartbeat.long_task("publish"):
            self.version = self.publisher.publish(
                self.masters.source.tensors(), metadata=metadata.to_dict()
            )
        self._diverged = False
        self.position = batch.position
        self.process.heartbeat.count_finished()
        done = events.span("publish", trained)
        self._record(batch, result, at=done, seconds=trained - started)
        if self.version % self.config.train.checkpoint_every == 0:
            with self.process.heartbeat.long_task("checkpoint"):
                self._checkpoint()
            events.span("checkpoint", done)

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
        self.publisher.flush()
        if self._saved == self.version or self._diverged:
            return
        self.process.lease.confirm()
        save_checkpoint(
            self.bucket,
            self.masters.state(),
            Ledger(),
            version=self.version,
            digest=self.publisher.digest.hex(),
            keep=self.config.retain.checkpoints,
            run=self.run.id,
        )
        self._saved = self.version
        self.version_retention.start(newest=self.version)

    def _finish(self) -> None:
        with self.process.heartbeat.long_task("finish"):
            self.publisher.close()
            self._checkpoint()
        if digest_of(self.masters.source) != self.publisher.digest and not self._diverged:
            raise BugError("the trainer's weights are not what it published", run=self.bucket.url)
        last = self.version >= self.config.train.versions
        self.credits.write("finished" if last else "stopped")

    def unfenced(self, error: FencedError) -> DeltawireError:
        """See `deltawire.rl.trainer.fencing.unfenced`."""
        return unfenced(self.bucket, self.run, self.epoch, error)
