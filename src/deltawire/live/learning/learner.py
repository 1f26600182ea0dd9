"""Learner: a worker that samples nothing; it makes groups of answers that users were served.

::

    records ─▶ matured answers ─▶ lineage n (create) ─▶ group n (create) ─▶ trainer, as any group

Of several learners each owns a part of the answers (`deltawire.live.learning.owners`). The lineage
comes first and claims its answers permanently. A learner that is killed in between
finds the lineage without its group when it starts again, and stores the group from it. So an answer
is in one group, and a group is consumed when the version that trained on it is committed. Only a
rebuild without a forgotten user releases answers again (`deltawire.rl.control.released_groups`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from deltawire.chat.requests import text_of
from deltawire.config import RunConfig
from deltawire.errors import FencedError, InputError, RetryError
from deltawire.events import Evaluated
from deltawire.live.compaction.maintenance import (
    MaintenanceThread,
    days_of,
    learner_compactor,
)
from deltawire.live.learning.edits import EditEncoder
from deltawire.live.learning.grouping import (
    GroupMaker,
    group_of_answers,
    group_without_users,
)
from deltawire.live.learning.owners import MOST_READ, AnswerOwners, OtherLineages
from deltawire.live.learning.pace import Pace
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.control.lineages import read_lineages
from deltawire.rl.control.released_groups import ReleasedGroups
from deltawire.rl.rollout.group_numbers import next_sequence
from deltawire.rl.rollout.trainer_link import TrainerLink
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.fleet import Fleet
from deltawire.runtime.process import Process
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import require_agreed
from deltawire.wire import keys
from deltawire.wire.lineage import MAX_LINEAGE_BYTES, Lineage, without_users
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.rollouts import MAX_GROUP_BYTES, Group, decode_group, encode_group
from deltawire.wire.run import Run
from deltawire.wire.status import MAX_ALARM, WorkerPhase, WorkerStatus

POLL_S = 1.0
BAR_EVERY_S = 10.0
REPORT_EVERY_S = 10.0
RELEASE_EVERY_S = 10.0
QUIET_S = 60.0
"""After so long without a group, `deltawire status` says what a learner waits for."""


class LiveGroups:
    """Stores groups of answers under a worker's name, each after its lineage.

    ``sequence`` is the number of the next group. ``released`` are groups whose answers may be in
    another one.
    """

    def __init__(
        self,
        bucket: Bucket,
        worker: str,
        maker: GroupMaker,
        *,
        first: int,
        released: Collection[tuple[str, int]] = (),
    ) -> None:
        self.sequence = first
        self._bucket = bucket
        self._worker = worker
        self._maker = maker
        self._released = released
        self._others = OtherLineages(bucket, worker)
        self._unfinished: list[Lineage] = []
        for lineage in read_lineages(bucket):
            self._others.skip(lineage)
            if (lineage.worker, lineage.sequence) in released:
                continue
            maker.claim(lineage, own=lineage.worker == worker)
            if lineage.worker == worker and lineage.sequence >= first:
                self._unfinished.append(lineage)

    def store(self, nonce: str, now: float, *, oldest: int = 0) -> bool:
        """Stores the next group; returns whether there was one to store. Version ``oldest`` or
        newer ones drew its answers.

        Raises `RetryError` if the store does not answer, and `FencedError` if another process
        stores under this worker's name. After an error the same call may be repeated: it stores the
        same group.
        """
        if not self._unfinished:
            for lineage in self._others.poll():
                if (lineage.worker, lineage.sequence) not in self._released:
                    self._maker.claim(lineage)
            count = self._maker.config.rollout.group_size
            answers = self._maker.prepare(now, count, oldest=oldest)
            if answers is None:
                return False
            self._unfinished.append(
                Lineage(
                    worker=self._worker,
                    sequence=self.sequence,
                    at=now,
                    rules=self._maker.rules.digest,
                    answers=answers,
                    corrections=self._maker.corrections.take(),
                )
            )
        lineage = self._unfinished[0]
        self._create_lineage(lineage)
        group = self._group_of(lineage, nonce)
        if group is None:  # All its users were forgotten: the number is free again.
            self._bucket.delete(keys.live_lineage(self._worker, lineage.sequence))
        else:
            self._create_group(lineage, group)
            self.sequence = lineage.sequence + 1
        self._unfinished.pop(0)
        return True

    def _create_lineage(self, lineage: Lineage) -> None:
        """Stores a lineage without the users who were forgotten by then.

        An erasure that begins later finds the lineage, and so names the group. Of an earlier one
        the record is read here, before anything of the user is in a group.
        """
        key = keys.live_lineage(self._worker, lineage.sequence)
        forgotten = self._maker.records.forgotten
        data = encode_json(without_users(lineage, forgotten))
        found: bytes | None = data
        if not self._bucket.create(key, data):  # An earlier attempt stored it, or another learner.
            found = require_agreed(
                self._bucket, key, limit=MAX_LINEAGE_BYTES, so="no group was stored"
            )
            self._maker.records.poll_forgotten()
            stored = found and decode_json(found, Lineage, run=self._bucket.url, key=key)
            if not stored or without_users(stored, forgotten) != without_users(lineage, forgotten):
                raise self._fenced(key)
        self._forget(key, found, lambda: encode_json(without_users(lineage, forgotten)))

    def _create_group(self, lineage: Lineage, group: Group) -> None:
        key = keys.rollout(self._worker, lineage.sequence)
        forgotten = self._maker.records.forgotten
        found: bytes | None = (data := encode_group(group))
        if not self._bucket.create(key, data):
            found = require_agreed(
                self._bucket, key, limit=MAX_GROUP_BYTES, so="no group was stored"
            )
        self._maker.records.poll_forgotten()
        if found != data:  # Stored by an earlier attempt, and perhaps changed by an erasure.
            touched = found is not None and any(
                one.user in forgotten or not one.user for one in lineage.answers
            )
            if not touched or decode_group(found or b"", run="", key=key).nonce != group.nonce:
                raise self._fenced(key)
        self._forget(
            key, found, lambda: encode_group(group_without_users(group, lineage, forgotten))
        )

    def _forget(self, key: str, found: bytes | None, wanted: Callable[[], bytes]) -> None:
        """Replaces an object as long as it is not ``wanted``, which has nothing of the users who
        were forgotten by then: this may undo what an erasure has just replaced."""
        while True:
            self._maker.records.poll_forgotten()
            if found == (left := wanted()):
                return
            self._bucket.put(key, left)
            found = left

    def _fenced(self, key: str) -> FencedError:
        return FencedError(
            f"another process stores groups as worker {self._worker}",
            hint="give each learner its own --id; learners of one run share its answers",
            run=self._bucket.url,
            key=key,
        )

    def _group_of(self, lineage: Lineage, nonce: str) -> Group | None:
        """Returns the group of a lineage, whose order it has; None if no answer is left."""
        known = self._maker.records.answers
        captures = [known.get(one.answer) for one in lineage.answers]
        if not any(captures):
            return None
        better = {}
        for one, capture in zip(lineage.answers, captures, strict=True):
            if one.edit and capture is not None:
                tokens = self._maker.better_answer(one.answer, one.edit)
                if tokens is None:
                    raise RetryError(
                        f"the edit of an answer of group {lineage.sequence} cannot be read",
                        hint="its segment is in live/feedback/; deltawire status names it",
                        run=self._bucket.url,
                    )
                better[one.answer] = tokens
        return group_of_answers(
            lineage.answers,
            captures,
            worker=self._worker,
            nonce=nonce,
            temperature=self._maker.config.rollout.temperature,
            better=better,
        )


def check_learnable(config: RunConfig, url: str) -> None:
    """Raises `InputError` for a run whose trainer would misread or accuse a learner's groups."""
    hint = 'set train.loss.advantage = "given" and trust.rescore_share = 0'
    if config.train.loss.advantage != "given":
        reason = "a learner's groups state advantages, and train.loss.advantage would change them"
        raise InputError(reason, hint=hint, run=url)
    if config.train.loss.traits.good_or_bad and config.live.baseline != "sign":
        reason = f"{config.train.loss.surrogate} needs good and bad answers, not advantages"
        raise InputError(reason, hint='set live.baseline = "sign"', run=url)
    if config.trust.rescore_share:
        reason = "trust.rescore_share would compute the rewards of users again and find no task"
        raise InputError(reason, hint=hint, run=url)


def open_edits(bucket: Bucket, run: Run, config: RunConfig) -> EditEncoder | None:
    """Returns what encodes edits with the run's tokenizer; None for a run without pairs."""
    if config.train.loss.preference.kind == "none":
        return None
    from deltawire.export.models import fetch_model_files, load_tokenizer  # They need torch.

    with fetch_model_files(bucket, run) as folder:
        tokenizer = load_tokenizer(Path(folder))
    return EditEncoder(text_of(config, tokenizer, bucket=bucket.url), config)


class LearnerLoop:
    """A learner's loop: reads records, and stores a group for each credit."""

    def __init__(
        self, process: Process, run: Run, config: RunConfig, *, report: Callable[[str], None]
    ) -> None:
        self.process = process
        self.config = config
        self.phase: WorkerPhase = "sampling"
        self._report = report
        self._reported_at = self._bar_at = self._released_at = float("-inf")
        self._stored_at = time.monotonic()
        self._waits = "it has just started"
        self._accuracy: float | None = None
        self._open = not config.live.start_bar
        self.records = LiveRecords(process.bucket)
        self.records.poll()
        self._edits = open_edits(process.bucket, run, config)
        self._released = ReleasedGroups(process.bucket, run)
        self._released.poll()
        self.owners = AnswerOwners(
            process.name,
            Fleet(process.bucket, silence_s=config.faults.silence_s, most_read=MOST_READ),
        )
        self._first = next_sequence(process)
        self._begin(self._first)
        self.pace = Pace(process.bucket, run, process.name, config.train, first=self._first)
        self.link = TrainerLink(process.bucket, process.name, silence_s=config.faults.silence_s)
        self._started = 0
        process.heartbeat.worker = self._status
        process.heartbeat.alarm = lambda: self.records.alarm

    def _begin(self, first: int) -> None:
        """Claims the answers of all lineages that were not released, and goes on at ``first``."""
        self.maker = GroupMaker(self.config, self.records, owns=self.owners.owns, edits=self._edits)
        self.groups = LiveGroups(
            self.process.bucket,
            self.process.name,
            self.maker,
            first=first,
            released=self._released.groups,
        )

    def _status(self) -> WorkerStatus:
        trainer = self.link.status
        return WorkerStatus(
            phase=self.phase,
            version=trainer.version if trainer else 0,
            digest=trainer.digest if trainer else "",
            stored=self.groups.sequence,
            first=self._first,
            learns=True,
            waits=self.waits if time.monotonic() - self._stored_at >= QUIET_S else "",
        )

    @property
    def waits(self) -> str:
        """The reason why the last turn stored no group; empty if it stored one, or if the trainer
        has granted no further one."""
        return self._waits[:MAX_ALARM]

    def run(self) -> None:
        """Learn until the run is finished or the process is asked to stop."""
        self.link.start()
        try:
            while not self.process.stopping:
                self.process.heartbeat.progress("wait")
                self.link.raise_error()
                status = self.link.status
                if status is not None and status.phase == "finished":
                    self.phase = "finished"
                    return
                if not self._turn():
                    self.process.wait(POLL_S)
        finally:
            self.link.close()
            self.phase = "finished" if self.phase == "finished" else "stopped"

    def _turn(self) -> bool:
        """Read what is new and store at most one group; returns whether one was stored."""
        try:
            self.records.poll()
            self.owners.poll(time.monotonic())
            self._release()
            stored = self._may_store() and self._store()
        except RetryError as error:
            self._waits = f"the store does not answer: {error.message}"
            self._log_line(f"waits for the store: {error.message}")
            return False
        found = sorted(self.maker.states.items())
        states = ", ".join(f"{count} {name}" for name, count in found if count)
        delays = self.maker.delays
        waits = sorted(delays.waits.items()) if delays else []
        fit = "".join(f"; {kind} is waited for {wait_s:.0f} s" for kind, wait_s in waits)
        self._log_line(
            f"{self.groups.sequence - self._first} groups stored; {states or 'no answers'}{fit}"
        )
        return stored

    def _release(self) -> None:
        """Offers the answers again whose versions were withdrawn to forget a user. All is read
        again, as at a start: a baseline must not count them twice."""
        now = time.monotonic()
        if now - self._released_at >= RELEASE_EVERY_S:
            if self._released.poll():
                self._begin(self.groups.sequence)
                self._report("a run is rebuilt without a user: trains again on the other answers")
            self._released_at = now

    def _may_store(self) -> bool:
        status = self.link.status
        self._waits = ""
        if status is None or status.phase != "training" or self.link.secret is None:
            phase = status.phase if status is not None else "not running"
            self._waits = f"the trainer is {phase}" if phase != "training" else ""
            return False
        if status.credits.get(self.process.name, 0) <= self.groups.sequence:
            return False
        if time.time() < self._released.paused_until():
            self._waits = "the evaluation gate stopped several candidates in a row: learning pauses"
            return False
        now = time.monotonic()
        self.pace.poll(status.version, now)
        learners = len(self.owners.learners)
        if not self.pace.may_store(self.groups.sequence, now=now, learners=learners):
            return False
        return self._open or self._passes_bar()

    def _passes_bar(self) -> bool:
        """Returns whether the newest evaluated version has the accuracy of ``live.start_bar``."""
        now = time.monotonic()
        if now - self._bar_at >= BAR_EVERY_S:
            self._bar_at = now
            found = [
                e for e in events_of(self.process.bucket, "evaluator") if isinstance(e, Evaluated)
            ]
            newest = max(found, key=lambda event: event.version, default=None)
            self._accuracy = newest.accuracy if newest is not None else None
            self._open = newest is not None and newest.accuracy >= self.config.live.start_bar
        if not self._open:
            known = "no version is evaluated yet"
            if self._accuracy is not None:
                known = f"the newest evaluated version has {self._accuracy:.3g}"
            self._waits = f"live.start_bar is {self.config.live.start_bar:g}, and {known}"
        return self._open

    def _store(self) -> bool:
        lease, secret = self.process.lease.number, self.link.secret
        nonce = nonce_of(secret, lease, self._started) if secret else self.process.nonce
        self.process.lease.confirm()
        oldest = self.pace.oldest_version(self.groups.sequence, learners=len(self.owners.learners))
        if not self.groups.store(nonce, time.time(), oldest=oldest):
            self._waits = self.maker.lacks
            return False
        self._started += 1
        self._stored_at = time.monotonic()
        self.process.heartbeat.count_finished()
        return True

    def _log_line(self, line: str) -> None:
        if time.monotonic() - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = time.monotonic()
            self._report(line)


def run_learner(process: Process, *, report: Callable[[str], None]) -> None:
    """Runs a learner process from its start to the run's end or a signal."""
    process.record_life("started")
    run, config = process.open_run()
    check_learnable(config, process.bucket.url)
    with process.heartbeat.long_task("start"):
        loop = LearnerLoop(process, run, config, report=report)
    report(f"joined run {config.name} as {process.name}")
    maintenance = MaintenanceThread(
        [learner_compactor(process.bucket, process.name)], days_of(config.retain)
    )
    process.heartbeat.alarm = lambda: (
        loop.records.alarm
        or (f"lineages are not compacted: {maintenance.alarm}" if maintenance.alarm else "")
    )
    maintenance.start()
    try:
        loop.run()
    finally:
        maintenance.close()
    process.record_life("stopped")
