"""Trainer process: takes groups from the bucket, makes versions, grants credits.

Concurrency::

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

import time
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import torch

from deltawire.config import RunConfig
from deltawire.errors import (
    InputError,
    RetryError,
    StoppedError,
    UnreadableError,
)
from deltawire.events import Restored, Step, known
from deltawire.parity import finite, parity_event
from deltawire.reward_monitor.watch import ProbeWatch
from deltawire.rl.budget.controller import BudgetFollower
from deltawire.rl.control.challenges import Challenges
from deltawire.rl.control.credits import settle
from deltawire.rl.control.draws import DrawBook
from deltawire.rl.control.drop_bias import causes_of, failures_of, families_of
from deltawire.rl.control.intake import Intake
from deltawire.rl.control.rollout_buffer import Batch, RolloutBuffer
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.rl.control.staleness import policy_of
from deltawire.rl.control.trained_answers import TrainedAnswers
from deltawire.rl.control.worker_guard import WorkerGuard
from deltawire.rl.evaluate.rescoring import Rescoring
from deltawire.rl.forecast.stop_rule import StopRule
from deltawire.rl.reference.reader import await_scores
from deltawire.rl.trainer.allocation import allocation_event, dropped_groups, open_allocator
from deltawire.rl.trainer.group_steps import GroupSteps
from deltawire.rl.trainer.leader import Leader
from deltawire.rl.trainer.orders import Orders, Train
from deltawire.rl.trainer.parity_recheck import ParityRecheck
from deltawire.rl.trainer.progress_alarm import ProgressAlarm
from deltawire.rl.trainer.proof_retention import ProofRetention
from deltawire.rl.trainer.ratio_stop import RatioStop
from deltawire.rl.trainer.resume import groups_of, metadata_at
from deltawire.rl.trainer.rollbacks import RollbackWatch
from deltawire.rl.trainer.settings import moved_settings
from deltawire.runtime.event_archive import EventArchiver
from deltawire.runtime.fleet import MOST_READ, Fleet
from deltawire.runtime.process import Process
from deltawire.runtime.reaper import Reaper
from deltawire.runtime.retained import RetainedFile
from deltawire.sync import (
    CommitStats,
)
from deltawire.train.arithmetic import arithmetic_of
from deltawire.train.checkpoint_folders import kept_intervals, needed_checkpoints
from deltawire.train.statistics import GroupStatistics, pairs_of
from deltawire.train.step import StepResult
from deltawire.wire.decisions import Decision
from deltawire.wire.ledger import CommitMetadata, ranges_of
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer
from deltawire.wire.status import TrainerStatus

STORE_PATIENCE_S = 300.0


class Trainer(Leader[StepResult]):
    """Trains version after version; holds the state between two steps.

    It leads the other ranks, if there are any; they run `deltawire.rl.trainer.rank.Rank.follow`.
    """

    def __init__(
        self,
        process: Process,
        run: Run,
        config: RunConfig,
        model: Any,
        *,
        signer: Signer | None = None,
        orders: Orders | None = None,
    ) -> None:
        self._steps = GroupSteps(process.bucket, run, config)
        self.alarm = ProgressAlarm(process.events.record)
        self.stop_rule = StopRule(process.bucket, config, process.events.record)
        self.ratios = RatioStop(config)
        self.controller = BudgetFollower(process.bucket, config)
        super().__init__(process, run, config, model, self._steps, signer=signer, orders=orders)
        self.ledger = self.rank.ledger
        self.fleet = Fleet(self.bucket, silence_s=config.faults.silence_s, most_read=MOST_READ)
        before = self.before
        draws = self._open_draws(before)
        self.allocator = open_allocator(self.bucket, run, config, draws, version=self.version)
        self.credits = self._open_credits(
            self.ledger.copy(),
            before.credits if before else self._claimed(),
            draws,
            self.allocator,
        )
        vocabulary = model.get_input_embeddings().num_embeddings
        self._read_groups(before, Bounds.of(config, vocabulary))
        serve = getattr(self.masters.source, "write_served", lambda _: None)
        if (served := config.rollout.weights) in self.rank.further.by_name:
            serve = partial(self.rank.further.serve, served)
        self.recheck = ParityRecheck(self.masters.model, config, report=self._report, serve=serve)
        self.rollbacks = RollbackWatch(self.bucket, run, checkpoints=config.retain.checkpoints)
        self.intake = Intake(
            self.fleet, Reaper(self.bucket), self.credits, self.guard, self.buffer, self.ledger
        )
        floors, keep = RetainedFile(self.bucket), config.retain
        self.archiver = EventArchiver(self.bucket, keep_days=keep.events_days, floors=floors)
        self.retention = RolloutRetention(self.bucket, run, keep=keep.rollouts, floors=floors)
        self.proofs = ProofRetention(self.bucket, run, keep=keep.proofs, rollouts=self.retention)
        self._trim_alarm = self._proof_alarm = ""
        process.heartbeat.alarm = self._alarm
        self._answered_at = time.monotonic()
        self._mark = process.events.now()

    def _read_groups(self, before: TrainerStatus | None, bounds: Bounds) -> None:
        """Make the objects that read, bound and check groups; ``before`` is an earlier trainer's
        status."""
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
            drawn=self.credits.drawn,
            allocator=self.allocator,
            owed=self.credits.owed,
            answers=TrainedAnswers(self.bucket, self.run, self.ledger),
        )

    def _alarm(self) -> str:
        """The objects that could not be read, so that nothing old is deleted; else empty."""
        alarms = (self.archiver.alarm, self._trim_alarm, self._proof_alarm)
        return next(filter(None, alarms), self.version_retention.alarm)

    def _on_commit(self, receipt: CommitStats) -> None:
        super()._on_commit(receipt)
        self.alarm.committed(receipt.version, receipt.changed)

    def loop(self) -> None:
        """Train until the last version, or until asked to stop; then `close`."""
        try:
            self._loop()
        finally:
            self.close()

    def close(self) -> None:
        """See `Leader.close`."""
        self.archiver.close()
        super().close()
        self.buffer.close()
        self.rescoring.close()
        self.recheck.close()

    def _loop(self) -> None:
        self.begin()
        while self.is_training:
            if not self.turn():
                self.process.wait(self.bucket.poll_s / 4)
        self.finish()

    def begin(self) -> None:
        """Grant the first credits. With `turn` and `finish` these are the parts of `loop`, for a
        caller that leads several trainers."""
        self.archiver.start()
        self.credits.follow(self.controller.poll())
        self.credits.observe(self.buffer, self._poll() or set(), self.fleet.begun)
        self.credits.write("training")
        self._answered_at = time.monotonic()
        self._mark = self.process.events.now()

    @property
    def is_training(self) -> bool:
        """Return whether versions are left to make, and nobody asked to stop."""
        return not (self.is_complete or self.process.stopping)

    @property
    def is_complete(self) -> bool:
        """Return whether the last version is made, or the stop rule holds."""
        return super().is_complete or self.stop_rule.reached

    def turn(self) -> bool:
        """Take a step if there are groups for one; returns whether there were."""
        events = self.process.events
        self.process.heartbeat.progress("wait")
        self.keep_waiting()
        rollback = self.rollbacks.poll(version=self.version)
        if rollback is not None and self.config.live.release.restore:
            self._mark = self._follow(rollback, events.now())
            return True
        batch = None
        if (alive := self._poll()) is not None:
            self._stop_if_all_fail()
            batch = self.buffer.next_batch(
                self.credits.staleness, version=self.version, alive=alive
            )
            self.credits.observe(self.buffer, alive, self.fleet.begun)
            self.credits.follow(self.controller.poll())
            self.credits.write()
        if batch is None:
            self._mark = events.span("wait", self._mark)
            return False
        self._mark = self._step(batch, events.now())
        return True

    def _open_draws(self, before: TrainerStatus | None) -> DrawBook:
        """The book of draws as an earlier trainer left it, at the newest version."""
        if before is None or before.draws is None:
            metadata = None
            if self.version:
                metadata, _ = metadata_at(self.bucket, self.run, self.version)
            return DrawBook(next_position=metadata.position if metadata else 0)
        book = DrawBook(
            next_position=before.next_draw, returned=before.returned, draws=before.draws
        )
        for version in range(before.version + 1, self.version + 1):
            settled = groups_of(self.bucket, self.run, version)
            if self.config.rollout.allocation.policy != "fixed":
                settled += dropped_groups(self.bucket, self.run, version)
            for one in settled:
                lease, number = Challenges.numbers(one.group.nonce)
                book.arrive(one.worker, one.sequence, lease, number)
                book.settle(one.worker, one.sequence)
        return book

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
            alive = self.intake.poll()
        except RetryError:
            if time.monotonic() - self._answered_at > STORE_PATIENCE_S:
                raise
            self.process.wait(1.0)
            return None
        self._answered_at = time.monotonic()
        return alive

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
        consumed = [(one.group.worker, one.sequence) for one in batch.taken]
        if not await_scores(
            self.process, self._steps.reference, batch.taken, tick=self.keep_waiting
        ):
            return started  # It was asked to stop while it waited.
        metadata = CommitMetadata(
            step=version,
            consumed=consumed,
            dropped=ranges_of(batch.dropped),
            hashes=[one.hash for one in batch.taken],
            threads=torch.get_num_threads(),
            settings={**self.settings, **moved_settings(self.credits.budget, self.config)},
            position=self.credits.draws.next_position,
            ranks=self.rank.mesh.ranks,
            arithmetic=arithmetic_of(self.rank.mesh.device),
            parts=batch.parts,
            prompts=batch.prompts,
        )
        order = Train(base=base, metadata=metadata)
        result = self._train(order, batch.taken)
        if result is None:
            return started  # It was asked to stop; the next trainer takes these groups.
        trained = events.span("train", started)
        self._record_parity(batch, result, version)
        self.alarm.step(version, result)
        self._publish(order.metadata)
        settle(self.ledger, metadata)
        self._learn_of_prompts(batch)
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
                **asdict(GroupStatistics.of(groups, batch.parts)),
                pairs=pairs_of(groups, self.config),
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
            self._checkpoint()
            done = events.span("checkpoint", done)
        self.stop_rule.stepped(self.version)
        return done

    def _follow(self, rollback: Decision, started: float) -> float:
        """Publish the version that a rollback restores as the next one, and train on from there."""
        self.publisher.flush()
        record = self.rollbacks.record(rollback, version=self.version)
        found = self._return_to(rollback.serving)
        record = msgspec.structs.replace(
            record, state=found.state, checkpoint=found.checkpoint, steps=found.steps
        )
        metadata = CommitMetadata(
            step=self.publisher.next_version,
            threads=torch.get_num_threads(),
            settings=self.settings,
            position=self.credits.draws.next_position,
            ranks=self.rank.mesh.ranks,
        )
        self._publish(metadata, record)
        self.publisher.flush()  # Until it is committed, the rollback is not followed.
        self.rollbacks.followed(rollback)
        events = self.process.events
        done = events.span("publish", started)
        restored = Restored(
            process=self.process.name,
            at=done,
            version=self.version,
            decision=record.decision,
            restored=record.restored.version,
            first=record.first,
            last=record.last,
            groups=sum(count for _, _, count in record.groups),
            state=record.state,
            seconds=done - started,
        )
        events.record(restored)
        self._report(restored.line)
        self._checkpoint()
        return events.span("checkpoint", done)

    def _learn_of_prompts(self, batch: Batch) -> None:
        """Tell the allocator what the step committed, and record it."""
        if self.allocator is None:
            return
        self.allocator.commit(batch.prompts, version=self.version)
        self.process.events.record(
            allocation_event(batch, self.config, process=self.process.name, version=self.version)
        )

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
        try:
            parity.raise_if_stopped(run=self.bucket.url, version=version)
            self.ratios.step(parity.drift, run=self.bucket.url, version=version)
        except StoppedError:
            self.process.events.flush()
            self.publisher.flush()
            self.credits.write("stopped")
            raise

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
        self._choose_interval()
        if self._save(self.ledger):
            self._trim()

    def _choose_interval(self) -> None:
        """Chooses the intervals that are kept for proofs, before the state of this version is
        stored."""
        # Not "checkpoint": a short choice would shorten what the first save is allowed.
        with self.process.heartbeat.long_task("choose intervals"):
            try:
                if self.proofs.is_idle:
                    self._proof_alarm = ""
                    return
            except UnreadableError as error:
                self._proof_alarm = str(error)
                return
            self.publisher.flush()
            self.rank.checkpoints.flush()
            if self.rank.diverged or not self.version:
                return
            try:
                self.proofs.choose(self.version)
                self._proof_alarm = ""
            except UnreadableError as error:
                self._proof_alarm = str(error)  # All are kept; the next checkpoint tries again.

    def _trim(self) -> None:
        """Deletes groups and versions that no complete checkpoint needs."""
        if kept := needed_checkpoints(self.bucket, self.config.retain.checkpoints):
            try:
                intervals = kept_intervals(self.bucket)
                self.retention.trim(
                    newest=self.version, oldest_checkpoint=min(kept), intervals=intervals
                )
                self._trim_alarm = ""
            except UnreadableError as error:
                self._trim_alarm = str(error)  # Training goes on; the next checkpoint tries again.
                return
            served = self.rollbacks.oldest_served
            self.version_retention.start(newest=self.version, served=served)

    def finish(self) -> None:
        """Commit and save what is under way, and write the last status."""
        self._finish()

    def _finish(self) -> None:
        if self._needs_last_checkpoint():
            self._choose_interval()
        with self.process.heartbeat.long_task("finish"):
            self._finish_ranks(self.ledger)
            self._trim()
            self.version_retention.close()
            self.probes.close()
        self._write_last_status()
