"""Workers of a simulated run, the part of a trainer that grants and consumes groups, and what must
hold of groups at every moment.

Leases, heartbeats, liveness, credits, challenges, draws, uploads, the rollout buffer, consumption
and retention are the project's own. A worker samples by sleeping, and serves a version as soon as
the trainer's status names it: engines and event loops are not simulated.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import blake3
import numpy as np
from simulated_store import SimulatedBucket, Store
from simulated_time import scheduler, sleep

from deltawire.config import parse_config
from deltawire.events import Generated
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.control.credits import CreditIssuer, settle
from deltawire.rl.control.draws import DrawBook
from deltawire.rl.control.intake import Intake
from deltawire.rl.control.rollout_buffer import Batch, RolloutBuffer, read_consumed
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.rl.control.staleness import policy_of
from deltawire.rl.control.trained_answers import TrainedAnswers
from deltawire.rl.control.worker_guard import WorkerGuard
from deltawire.rl.rollout.group_numbers import draw_of, next_sequence
from deltawire.rl.rollout.trainer_link import TrainerLink
from deltawire.rl.rollout.uploader import Uploader
from deltawire.runtime import heartbeat
from deltawire.runtime.fleet import Fleet, known_trainer
from deltawire.runtime.process import Process
from deltawire.runtime.reaper import Reaper
from deltawire.store import Bucket, without_retries
from deltawire.sync import Publisher, read_history
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS, CommitMetadata, Ledger, ranges_of
from deltawire.wire.manifest import Manifest
from deltawire.wire.rollouts import Group, Trajectory, decode_group
from deltawire.wire.run import Run
from deltawire.wire.status import StoreTraffic, WorkerStatus

PER_STEP = 2
CHECKPOINT_EVERY = 4
KEPT_VERSIONS = 2
CONFIG = parse_config(
    {
        "name": "r",
        "model": {"build": {}},
        "train": {"groups_per_step": PER_STEP, "max_staleness": 2},
    },
    source="simulation",
)


def _impatient(bucket: Bucket) -> Bucket:
    bucket = without_retries(bucket)
    assert isinstance(bucket, SimulatedBucket)
    return bucket.with_timeout(heartbeat.REQUEST_S)


# The real ones open a connection of their own, and count what this process asked for.
heartbeat.impatient = _impatient
heartbeat.store_traffic = StoreTraffic


class BrokenError(AssertionError):
    """An invariant does not hold."""


class Groups:
    """Follows each group: stored and acknowledged, consumed or dropped, deleted."""

    def __init__(self, store: Store, counts: Counter[str]) -> None:
        self.counts = counts
        self._store = store
        self._largest_age = policy_of(CONFIG.train).largest_age
        self._settled: dict[tuple[str, int], int] = {}
        """By group, the version that settled it."""
        self._nonces: dict[tuple[str, int], str] = {}
        """By group that was settled, its nonce."""
        self._acknowledged: dict[tuple[str, int], float] = {}
        self._newest = 0
        self.checkpoints: list[int] = [0]
        """The versions of which a trainer has stored a checkpoint."""

    def acknowledge(self, worker: str, sequence: int, nonce: str) -> None:
        """A worker takes its group for stored."""
        group, key = (worker, sequence), keys.rollout(worker, sequence)
        held = self._store.objects.get(key)
        if self._nonces.get(group, nonce) != nonce:
            raise BrokenError(f"{worker} stored group {sequence} again, as another group")
        if held is None and group not in self._settled:
            raise BrokenError(f"{worker} takes group {sequence} for stored, and it is not")
        if held is not None and decode_group(held.data, run="", key=key).nonce != nonce:
            raise BrokenError(f"{worker} takes group {sequence} of another for its own")
        self._acknowledged.setdefault(group, scheduler().now)
        self.counts["stored groups"] += 1

    def committed(self, version: int, metadata: CommitMetadata) -> None:
        """A version settles groups."""
        self._newest = max(self._newest, version)
        for place, group in enumerate(metadata.consumed):
            self.counts["consumed"] += 1
            self._settle(group, version, "consumed")
            held = self._store.objects.get(keys.rollout(*group))
            if held is None:
                raise BrokenError(f"version {version} consumed {group}, which is not there")
            read = decode_group(held.data, run="", key=keys.rollout(*group))
            age = version - 1 - read.oldest_version
            if age > self._largest_age:
                raise BrokenError(f"version {version} consumed {group} at the age of {age}")
            if metadata.hashes[place] != blake3.blake3(held.data).hexdigest()[:GROUP_HASH_DIGITS]:
                raise BrokenError(f"version {version} consumed other bytes of {group}")
        for group in metadata.dropped_groups():
            self.counts["dropped"] += 1
            self._settle(group, version, "dropped")

    def _settle(self, group: tuple[str, int], version: int, how: str) -> None:
        if group in self._settled:
            before = self._settled[group]
            raise BrokenError(f"{group} was settled by version {before}, {how} by {version}")
        self._settled[group] = version
        if (held := self._store.objects.get(keys.rollout(*group))) is not None:
            read = decode_group(held.data, run="", key=keys.rollout(*group))
            self._nonces[group] = read.nonce

    def changed(self, key: str, before: bytes | None, after: bytes | None, by: str) -> None:
        """An object below ``rollouts/`` was stored or deleted."""
        group = keys.group_of(key)
        if group is None or before is None or before == after:
            return
        if after is not None:
            raise BrokenError(f"{by} replaced group {group}")
        self.counts["deleted groups"] += 1
        settled = self._settled.get(group)
        if settled is None:
            raise BrokenError(f"{by} deleted group {group}, which no version settled")
        # The last two checkpoints are kept, and a trainer may resume from either.
        if settled > min(self._newest - KEPT_VERSIONS, self.checkpoints[-2:][0]):
            raise BrokenError(f"{by} deleted group {group}, which a resumed trainer needs")

    def unsettled(self, before: float) -> list[tuple[str, int]]:
        """The groups that were stored before this moment and are neither consumed nor dropped."""
        found = self._acknowledged.items()
        return [group for group, at in found if at < before and group not in self._settled]


class TrainerIntake:
    """Reads groups and grants credits between two steps, as `deltawire.rl.trainer` does."""

    def __init__(
        self, program: Process, run: Run, groups: Groups, *, version: int, epoch: int
    ) -> None:
        bucket = program.bucket
        self.version = version
        self._program, self._groups = program, groups
        before = known_trainer(bucket)
        self._fleet = Fleet(bucket, silence_s=CONFIG.faults.silence_s)
        self._ledger = self._resumed(bucket, run)
        self.credits = CreditIssuer(
            bucket, CONFIG, self._ledger.copy(), epoch=epoch,
            granted=self._claimed() if before is None else dict(before.credits),
            confirm=program.lease.confirm,
            draws=DrawBook(
                next_position=before.next_draw, returned=before.returned, draws=before.draws
            ) if before is not None and before.draws is not None else DrawBook(),
        )  # fmt: skip
        self.credits.version = version
        policy, guard = self.credits.staleness, WorkerGuard(bucket, CONFIG)
        self._buffer = RolloutBuffer(
            bucket, self._ledger, limit=policy.limit, arrive=policy.arrive, guard=guard,
            drawn=self.credits.drawn, answers=TrainedAnswers(bucket, run, self._ledger), readers=2,
        )  # fmt: skip
        self._intake = Intake(
            self._fleet, Reaper(bucket), self.credits, guard, self._buffer, self._ledger
        )
        self._retention = RolloutRetention(bucket, run, keep=KEPT_VERSIONS)

    def _resumed(self, bucket: Bucket, run: Run) -> Ledger:
        """Reads what every version settled, and the groups that are trained on again."""
        ledger = Ledger()
        checkpoint = max(one for one in self._groups.checkpoints if one <= self.version)
        for manifest in read_history(bucket, run, to=self.version):
            metadata = metadata_of(manifest)
            if manifest.version > checkpoint:
                read_consumed(bucket, metadata)
            settle(ledger, metadata)
        return ledger

    def _claimed(self) -> dict[str, int]:
        self._fleet.poll()
        limit = PER_STEP * (CONFIG.train.max_staleness + 1)
        return {
            name: min(one.worker.stored, self._ledger.count(name) + limit)
            for name, one in self._fleet.heartbeats.items()
            if one.worker is not None
        }

    def poll(self) -> Batch | None:
        """Reads groups and grants credits; returns the groups of a step once there are enough."""
        self._program.heartbeat.progress("wait")
        alive = self._intake.poll()
        batch = self._buffer.next_batch(self.credits.staleness, version=self.version, alive=alive)
        self.credits.observe(self._buffer, alive, self._fleet.begun)
        self.credits.write("training")
        return batch

    def step(
        self, publisher: Publisher, weights: Any, stated: dict[str, Any], *, wait: bool
    ) -> None:
        """Publishes a version that consumes what there is. Raises what ends a trainer's process:
        the next one reads what was committed."""
        batch, metadata = self.poll(), CommitMetadata(step=publisher.next_version)
        if batch is not None:
            metadata = CommitMetadata(
                step=publisher.next_version,
                consumed=[(one.worker, one.sequence) for one in batch.taken],
                dropped=ranges_of(batch.dropped),
                hashes=[one.hash for one in batch.taken],
                position=self.credits.draws.next_position,
            )
        self.credits.expect(publisher.next_version, metadata)
        self.version = publisher.publish(
            weights, metadata={**stated, **metadata.to_dict()}, wait=wait
        )
        settle(self._ledger, metadata)
        if self.version - self._groups.checkpoints[-1] >= CHECKPOINT_EVERY:
            publisher.flush()
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Stores a checkpoint of the committed version, and deletes groups that are not needed."""
        self._groups.checkpoints.append(self.version)
        # The last two are kept.
        self._retention.trim(newest=self.version, oldest_checkpoint=self._groups.checkpoints[-2])


def work(name: str, bucket: Bucket, source: random.Random, groups: Groups, sample_s: float) -> None:
    """Runs a worker until an error ends it."""
    program = Process(bucket, name, "worker", supervised=True, pid=1)
    with program.registered():
        first = next_sequence(program)
        link = TrainerLink(program.bucket, name, silence_s=CONFIG.faults.silence_s)
        uploader = Uploader(program.bucket, name, first, program)
        submitted: deque[str] = deque()
        """The nonces of groups that are not stored yet."""
        _tell_stored(
            program, lambda event: groups.acknowledge(name, event.sequence, submitted.popleft())
        )
        program.heartbeat.worker = lambda: WorkerStatus(
            phase="sampling", version=link.status.version if link.status else 0, digest="",
            attested=False, lag=0, stored=uploader.stored, first=first,
        )  # fmt: skip
        link.start()
        uploader.start()
        started, drawn, lease = first, 0, program.lease.number
        while True:
            program.heartbeat.progress("sample")
            link.raise_error()
            uploader.raise_error()
            status, secret = link.status, link.secret
            if (
                status is None
                or secret is None
                or started >= status.credits.get(name, 0)
                or draw_of(status, name, lease, drawn, secret, nonce=program.nonce) is None
            ):
                sleep(2.0)
                continue
            nonce = nonce_of(secret, lease, drawn) if secret else program.nonce
            started, drawn = started + 1, drawn + 1
            sleep(sample_s * (0.2 + source.random()))
            submitted.append(nonce)
            uploader.submit(_group(name, nonce, status.version))


def _tell_stored(program: Process, tell: Callable[[Generated], None]) -> None:
    """Calls ``tell`` with the event of each group that the worker takes for stored."""
    record = program.events.record

    def heard(event: Any) -> None:
        if isinstance(event, Generated):
            tell(event)
        record(event)

    program.events.record = heard  # type: ignore[method-assign]


def _group(worker: str, nonce: str, version: int) -> Group:
    trajectories = [
        Trajectory(
            np.array([number, 2], np.int32), np.zeros(2, np.float32),
            np.full(2, version, np.int32), np.ones(2, np.uint8), float(number), "stop",
        )
        for number in range(2)
    ]  # fmt: skip
    return Group(worker, nonce, "task", 1.0, np.array([1], np.int32), trajectories)


def metadata_of(manifest: Manifest) -> CommitMetadata:
    """Returns what a version settles."""
    return CommitMetadata.of(manifest.metadata, run="", version=manifest.version)
