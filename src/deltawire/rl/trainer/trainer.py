"""Trainer process: takes groups from the bucket, makes versions, grants credits.

Who waits for whom::

    main thread                                    publisher's thread
      poll groups ─▶ batch of the oldest               encode, upload, commit manifest
      forward, backward, optimizer                     └─▶ credits.committed(receipt):
      publish (copy only) ───────────────────────────▶     settle groups, grant credits,
      │ waits only if the previous version                 write trainer.json
      ▼ is not committed yet
      next batch

    archiver's thread    old events, and those of workers that are gone ─▶ archive/
    recheck thread       groups of older versions, scored with a copy of their weights

One create commits a step: the metadata in the new version's manifest names the groups that made
it. A trainer that dies loses at most the steps since its last checkpoint. Its successor recomputes
them from the manifests' metadata, on the same groups in the same order, to the same bits.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deltawire.config import RunConfig
from deltawire.errors import (
    BugError,
    DeltawireError,
    FencedError,
    InputError,
    ResyncError,
    RetryError,
    StoppedError,
)
from deltawire.events import Published, Step, known
from deltawire.export.adapter import open_model
from deltawire.export.models import fetch_model_files
from deltawire.parity import finite, parity_event
from deltawire.placement.device import resolve_device
from deltawire.reward_monitor.watch import ProbeWatch
from deltawire.rl.control.credits import CreditIssuer, settle
from deltawire.rl.control.drop_bias import causes_of, failures_of, families_of
from deltawire.rl.control.rollout_buffer import Batch, RolloutBuffer
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.rl.control.staleness import policy_of
from deltawire.rl.control.worker_guard import WorkerGuard
from deltawire.rl.evaluate.rescoring import Rescoring
from deltawire.rl.reference.reader import ReferenceReader, await_scores
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.fencing import unfenced
from deltawire.rl.trainer.midtraining import Midtrainer
from deltawire.rl.trainer.parity_recheck import ParityRecheck
from deltawire.rl.trainer.progress_alarm import ProgressAlarm
from deltawire.rl.trainer.resume import groups_of, recompute_step, resume, seed_step
from deltawire.rl.trainer.settings import announce_settings
from deltawire.rl.trainer.version_retention import VersionRetention
from deltawire.runtime.event_archive import EventArchiver
from deltawire.runtime.fleet import POLL_S, Fleet, known_trainer, next_epoch
from deltawire.runtime.process import Process, open_run
from deltawire.runtime.reaper import Reaper
from deltawire.runtime.retained import RetainedFile
from deltawire.sync import (
    COMPACTION_STRIDES,
    CommitStats,
    Mirror,
    Publisher,
    load_mirror,
)
from deltawire.train.checkpoint import CheckpointWriter, checkpoint_versions
from deltawire.train.masters import MasterWeights
from deltawire.train.parallel.ranks import world_of
from deltawire.train.statistics import GroupStatistics
from deltawire.train.step import StepResult, train_step
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger, ranges_of
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer
from deltawire.wire.status import TrainerStatus

STORE_PATIENCE_S = 300.0


class Trainer:
    """Trains version after version; holds the state between two steps."""

    def __init__(
        self,
        process: Process,
        run: Run,
        config: RunConfig,
        model: Any,
        *,
        signer: Signer | None = None,
    ) -> None:
        self.process = process
        self.bucket = process.bucket
        self.run = run
        self.config = config
        head = load_mirror(self.bucket, run)
        if head is None:
            raise InputError(
                "the run has no version 0",
                hint="start it with deltawire run",
                run=self.bucket.url,
            )
        before = known_trainer(self.bucket)
        epoch = self.epoch = next_epoch(self.bucket, run, head.version)
        self.version = head.version
        self.ledger = Ledger()
        self.settings = announce_settings(process, run, config)
        self.masters = self._restore(model, head)
        self.fleet = Fleet(self.bucket, silence_s=config.faults.silence_s)
        self.credits = CreditIssuer(
            self.bucket,
            config,
            self.ledger.copy(),
            epoch=epoch,
            granted=dict(before.credits) if before else self._claimed(),
            confirm=process.lease.confirm,
            settings=self.settings,
        )
        self.credits.version, self.credits.digest = head.version, head.digest.hex()
        vocabulary = model.get_input_embeddings().num_embeddings
        self._read_groups(before, Bounds.of(config, vocabulary))
        self.recheck = ParityRecheck(self.masters.model, config, report=self._report)
        self.reaper = Reaper(self.bucket)
        floors, keep = RetainedFile(self.bucket), config.retain
        self.archiver = EventArchiver(self.bucket, keep_days=keep.events_days, floors=floors)
        self.retention = RolloutRetention(self.bucket, run, keep=keep.rollouts, floors=floors)
        self.version_retention = VersionRetention(
            self.bucket,
            run,
            keep=config.retain.versions,
            report=self._report,
            signer=signer,
        )
        self.publisher = self._open_publisher(head, signer)
        self.checkpoints = CheckpointWriter(
            self.bucket,
            self.masters.mesh,
            run=run.id,
            confirm=process.lease.confirm,
        )
        self._saved = -1
        self._answered_at = time.monotonic()

    def _read_groups(self, before: TrainerStatus | None, bounds: Bounds) -> None:
        """Make what reads, bounds and checks groups; ``before`` is an earlier trainer's status."""
        record = self.process.events.record
        self.probes = ProbeWatch(
            self.bucket,
            self.config.probes,
            version=self.version,
            again=lambda version: groups_of(self.bucket, self.run, version),
            record=record,
        )
        self.rescoring = Rescoring(self.bucket, self.run, self.config)
        self.guard = WorkerGuard(
            self.bucket,
            self.config,
            record=record,
            known=before.incidents if before else (),
            rescorer=self.rescoring,
        )
        self.buffer = RolloutBuffer(
            self.bucket,
            self.ledger,
            limit=self.credits.staleness.limit,
            bounds=bounds,
            arrive=self.credits.staleness.arrive,
            withhold=self.probes.withholds,
            guard=self.guard,
        )
        self.alarm = ProgressAlarm(record)

    def _report(self, fault: str) -> None:
        """Record a fault that does not end the run."""
        self.process.record_life("started", fault)

    def _open_publisher(self, head: Mirror, signer: Signer | None) -> Publisher:
        train = self.config.train
        return Publisher(
            self.bucket,
            self.run,
            head,
            epoch=self.epoch,
            anchor_every=train.anchor_every,
            compaction_strides=COMPACTION_STRIDES if train.compaction else (),
            on_commit=self._on_commit,
            signer=signer,
        )

    def _restore(self, model: Any, head: Mirror) -> MasterWeights:
        """Restore the newest checkpoint, and recompute the steps from there to the head."""
        state = resume(self.bucket, self.run, self.config, model, newest=head.version)
        start, same = state.version, True
        while state.version < head.version:
            with self.process.heartbeat.long_task("recompute"):
                same = recompute_step(self.bucket, self.run, state).equal
        state.follow_settings(self.config.train)
        if start < head.version:
            self.process.record_life(
                "started",
                f"recomputed steps {start + 1} to {head.version}, "
                + ("to the same bits" if same else "to other bits; the next delta carries them"),
            )
        self.ledger, self.reference = state.ledger, state.reference
        self._diverged = not same
        return state.masters

    def _on_commit(self, receipt: CommitStats) -> None:
        self.credits.committed(receipt.version, receipt.digest)
        self.alarm.committed(receipt.version, receipt.changed)
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
        """Train until the last version, or until asked to stop; then `close`."""
        try:
            self._loop()
        finally:
            self.close()

    def close(self) -> None:
        """End all threads, also those that an error left running."""
        self.archiver.close()
        # An error of the version under way was raised before, or follows the one that ends the run.
        with contextlib.suppress(DeltawireError):
            self.publisher.close()
        with contextlib.suppress(DeltawireError):
            self.checkpoints.close()
        self.version_retention.close()
        self.buffer.close()
        self.rescoring.close()
        self.recheck.close()

    def _loop(self) -> None:
        events, train = self.process.events, self.config.train
        self.archiver.start()
        self.credits.observe(self.buffer, self._poll() or set())
        self.credits.write("training")
        self._answered_at = time.monotonic()
        mark = events.now()
        while self.version < train.versions and not self.process.stopping:
            self.process.heartbeat.progress("wait")
            if (alive := self._poll()) is None:
                mark = events.span("wait", mark)
                continue
            self._stop_if_all_fail()
            batch = self.buffer.next_batch(
                self.credits.staleness, version=self.version, alive=alive
            )
            self.credits.observe(self.buffer, alive)
            self.credits.write()
            if batch is None:
                self.process.wait(self.bucket.poll_s / 4)
                mark = events.span("wait", mark)
                continue
            mark = self._step(batch, events.now())
        self._finish()

    def _claimed(self) -> dict[str, int]:
        """Credits to start with if ``trainer.json`` is lost: the groups that the workers report."""
        self.fleet.poll()
        limit = policy_of(self.config.train).limit
        return {
            name: min(one.worker.stored, self.ledger.count(name) + limit)
            for name, one in self.fleet.heartbeats.items()
            if one.worker is not None
        }

    def _poll(self) -> set[str] | None:
        """Poll the fleet and fetch new groups; returns the workers that are alive.

        None while the store does not answer, which is tolerated for `STORE_PATIENCE_S`.
        """
        try:
            self.fleet.poll(every_s=POLL_S)
            for worker in self.reaper.run(self.fleet, self._is_settled):
                self.credits.forget(worker)
                self.buffer.forget(worker)
                self.guard.forget(worker)
            granted = self.credits.granted()
            fleet = self.fleet
            readable = self.guard.poll(fleet.known_workers, granted, fleet.expected_workers)
            self.buffer.poll(readable, granted)
        except RetryError:
            if time.monotonic() - self._answered_at > STORE_PATIENCE_S:
                raise
            self.process.wait(1.0)
            return None
        self._answered_at = time.monotonic()
        return self.fleet.workers & readable - self.buffer.quarantined.keys()

    def _is_settled(self, worker: str) -> bool:
        """Returns whether no step needs a group of this worker any more."""
        if worker in self.buffer.quarantined:
            return True
        heartbeat = self.fleet.heartbeats[worker]
        stored = heartbeat.worker.stored if heartbeat.worker else 0
        return self.credits.is_settled(worker) and self.ledger.count(worker) >= min(
            stored, self.credits.granted().get(worker, 0)
        )

    def _stop_if_all_fail(self) -> None:
        """Raise `InputError` once more groups in a row failed than the configuration allows."""
        limit, buffer = self.config.train.max_failed_groups, self.buffer
        if limit and buffer.failed >= limit and self.guard.blames_all(buffer.failing):
            raise InputError(
                f"{self.buffer.failed} groups in a row failed, "
                f"the last one by: {self.buffer.failure}",
                hint="repair the environment, or set train.max_failed_groups = 0 to continue",
                run=self.bucket.url,
                version=self.version,
            )

    def _step(self, batch: Batch, started: float) -> float:
        events = self.process.events
        groups = [one.group for one in batch.taken]
        base, version = self.version, self.publisher.next_version
        reference = await_scores(self.process, self.reference, batch.taken)
        if isinstance(reference, ReferenceReader):  # It was asked to stop while it waited.
            return started
        with self.process.heartbeat.long_task("train"):
            seed_step(self.config, version)
            result = train_step(
                self.masters, groups, self.config, reference=reference, version=base
            )
        trained = events.span("train", started)
        self._record_parity(batch, result, version)
        self.alarm.step(version, result)
        consumed = [(one.group.worker, one.sequence) for one in batch.taken]
        metadata = CommitMetadata(
            step=version,
            consumed=consumed,
            dropped=ranges_of(batch.dropped),
            hashes=[one.hash for one in batch.taken],
            threads=torch.get_num_threads(),
            settings=self.settings,
        )
        self.credits.expect(version, metadata)
        with self.process.heartbeat.long_task("publish"):
            self.version = self.publisher.publish(
                self.masters.source.trained(), partial=True, metadata=metadata.to_dict()
            )
        self._diverged = False
        self.process.heartbeat.count_finished()
        settle(self.ledger, metadata)
        done = events.span("publish", trained)
        self._watch_probes(batch)
        shares: dict[str, int] = {}
        for worker, _ in consumed:
            shares[worker] = shares.get(worker, 0) + 1
        events.record(
            Step(
                process=self.process.name,
                at=done,
                version=self.version,
                groups=len(groups),
                dropped=len(batch.dropped),
                reward_mean=result.reward_mean,
                loss=known(result.loss),
                grad_norm=known(result.grad_norm),
                k3=finite(result.parity.drift.k3),
                ratio_max=finite(result.parity.drift.ratio_max),
                clipped=result.clipped,
                rejected=result.rejected,
                kl=known(result.kl),
                entropy=known(result.entropy),
                **asdict(GroupStatistics.of(groups)),
                families=families_of(batch),
                causes=causes_of(batch),
                failures=failures_of(batch),
                staleness=batch.staleness,
                tokens=result.tokens,
                seconds=trained - started,
                workers=shares,
                queued=[base - group.newest_version for group in groups],
            )
        )
        if self.version % self.config.train.checkpoint_every == 0:
            with self.process.heartbeat.long_task("checkpoint"):
                self._checkpoint()
            done = events.span("checkpoint", done)
        return done

    def _record_parity(self, batch: Batch, result: StepResult, version: int) -> None:
        """Record sampler-trainer divergence; raises `StoppedError` if it stops the run."""
        groups = [one.group for one in batch.taken]
        parity = self.recheck.observe(result.parity, groups, version=version)
        names = [
            f"{batch.taken[group].group.worker}/{batch.taken[group].sequence}#{place}"
            for group, place in result.members
        ]
        self.process.events.record(
            parity_event(
                parity, process=self.process.name, at=time.time(), version=version, names=names
            )
        )
        if parity.stopped:
            self.process.events.flush()
            self.publisher.flush()
            self.credits.write("stopped")
            parity.raise_if_stopped(run=self.bucket.url, version=version)

    def _watch_probes(self, batch: Batch) -> None:
        """Compare rewards with probes; raises `StoppedError` if that stops the run."""
        try:
            self.probes.observe(batch.taken, version=self.version)
        except StoppedError:
            self.process.events.flush()
            self.publisher.flush()
            self.probes.close()
            self.credits.write("stopped")
            raise

    def _checkpoint(self) -> None:
        self.publisher.flush()
        # A state with other weights than its version's cannot be resumed, and would replace one
        # that can.
        if self._saved != self.version and not self._diverged:
            self.process.lease.confirm()
            self.checkpoints.save(
                self.masters.state(),
                self.ledger,
                version=self.version,
                digest=self.publisher.digest.hex(),
                keep=self.config.retain.checkpoints,
            )
            self._saved = self.version
            self._trim()

    def _trim(self) -> None:
        """Delete what no checkpoint that is complete needs."""
        if kept := checkpoint_versions(self.bucket):
            self.retention.trim(newest=self.version, oldest_checkpoint=min(kept))
            self.version_retention.start(newest=self.version)

    def _finish(self) -> None:
        with self.process.heartbeat.long_task("finish"):
            self.publisher.close()
            self._checkpoint()
            self.checkpoints.close()
            self._trim()
            self.version_retention.close()
            self.probes.close()
        if self.masters.digest() != self.publisher.digest and not self._diverged:
            raise BugError("the trainer's weights are not what it published", run=self.bucket.url)
        last = self.version >= self.config.train.versions
        self.credits.write("finished" if last else "stopped")

    def unfenced(self, error: FencedError) -> DeltawireError:
        """See `deltawire.rl.trainer.fencing.unfenced`."""
        return unfenced(self.bucket, self.run, self.epoch, error)


def run_trainer(
    process: Process,
    source: tuple[RunConfig, Path] | None,
    *,
    signer: Signer | None = None,
    run_id: str = "",
) -> None:
    """Run a trainer process from its start to the last version or a signal.

    In a signed run ``signer`` holds the owner's key, and a new run gets the id ``run_id``.

    ``source`` is the configuration and the model directory that a new run starts from; None
    continues an existing run. Raises `InputError` if the bucket holds another run.
    """
    started = time.time()
    process.record_life("started")
    if source is not None:
        start_run(process.bucket, *source, signer=signer, run_id=run_id)
    run, config = open_run(process.bucket)
    config = config if source is None else source[0]
    ranks = max(config.train.ranks, world_of()[1])
    if ranks > 1:
        raise InputError(
            f"train.ranks = {ranks}: a run's trainer is one process so far",
            hint="set train.ranks = 1, and start it without torchrun",
            run=process.bucket.url,
        )
    process.heartbeat.faults = config.faults
    torch.set_num_threads(config.threads)
    with fetch_model_files(process.bucket, run) as folder:
        model = open_model(Path(folder), config.train.adapter)
    model = model.to(resolve_device(config.device_of("trainer")))
    trainer: Trainer | Midtrainer
    if config.midtrain is not None:
        trainer = Midtrainer(process, run, config, model, signer=signer)
    else:
        trainer = Trainer(process, run, config, model, signer=signer)
    process.events.span("start", started)
    try:
        try:
            trainer.loop()
        except FencedError as error:
            raise trainer.unfenced(error) from error
        except InputError as error:
            raise _restartable(error) from error
    except DeltawireError as error:
        _record_error(process, error)
        raise
    process.record_life("stopped", f"version {trainer.version}")


def _restartable(error: InputError) -> DeltawireError:
    """Translate an error: `ResyncError` if an object that is no manifest has a version's name.

    Whoever may write can put one there, and the number is then skipped. The step that was to get it
    is computed again under the next number, because its random numbers depend on that.
    """
    if not error.key.startswith(keys.MANIFESTS):
        return error
    return ResyncError(
        error.message,
        hint="restart: the step gets the next free number",
        run=error.run,
        version=error.version,
        key=error.key,
    )


def _record_error(process: Process, error: DeltawireError) -> None:
    """Record an error, if the bucket still accepts events."""
    try:
        process.record_life("stopped", str(error))
    except (RetryError, InputError):
        return
