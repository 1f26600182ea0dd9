"""Pilots, fills, credits, drops and restarts together, under a simulated clock.

The accounting is the loop's own (`CreditIssuer`, `DrawBook`, `Allocator`, `RolloutBuffer`,
`Ledger`), on a memory bucket. Workers finish out of order, die between a pilot and its fill, and
come back under the next lease; the trainer dies with all but the bucket and its committed metadata.
"""

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.config import (
    AllocationConfig,
    RolloutConfig,
    RunConfig,
    StalenessConfig,
    TrainConfig,
)
from deltawire.rl.allocation.allocator import Allocator, completions_of, rewards_of
from deltawire.rl.control.challenges import Challenges, nonce_of
from deltawire.rl.control.credits import CreditIssuer, settle
from deltawire.rl.control.draws import DrawBook
from deltawire.rl.control.rollout_buffer import BufferedGroup, RolloutBuffer
from deltawire.rl.control.rollout_reader import read_group
from deltawire.runtime.fleet import read_trainer
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger, ranges_of
from deltawire.wire.rollouts import Group, Trajectory, encode_group

SECRET = "5e" * 16
TASKS = 12


def group_for(worker, lease, number, position, size, version, rng):
    """A group whose task decides how often it succeeds: never, at times, or always."""
    rate = (0.0, 0.5, 1.0)[position % 3]
    trajectories = [
        Trajectory(
            np.array([1], np.int32),
            np.array([-1.0], np.float32),
            np.array([version], np.int32),
            np.ones(1, np.uint8),
            float(rng.random() < rate),
            "stop",
        )
        for _ in range(size)
    ]
    nonce = nonce_of(SECRET, lease, number)
    task = f"task {position % TASKS}"
    return Group(worker, nonce, task, 1.0, np.array([7], np.int32), trajectories)


@dataclass
class PromptWorker:
    """A worker that samples up to ``slots`` groups at a time, in any order."""

    name: str
    slots: int
    slowness: int
    alive: bool = True
    lease: int = 0
    first: int = 0
    started: int = 0
    stored: int = 0
    version: int = 0
    running: list = field(default_factory=list)


@dataclass
class PromptSimulation:
    """One run; `tick` moves everything by one unit of time."""

    seed: int
    config: RunConfig
    workers: list
    mortality: float = 0.0
    amnesia: float = 0.0

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.bucket = open_bucket("memory://")
        self.ledger, self.committed = Ledger(), []
        self.now = self.version = 0
        self.batch = None
        self.most_prompts = self.most_while_busy = 0
        self.consumed, self.dropped, self.ages = [], [], []
        self._start_trainer(None)

    def _start_trainer(self, status):
        book = DrawBook()
        if status is not None:
            book = DrawBook(
                next_position=status.next_draw, returned=status.returned, draws=status.draws
            )
            for metadata in self.committed[status.version :]:
                for name, sequence in metadata.settled_groups():
                    found = BufferedGroup(sequence, *read_group(self.bucket, name, sequence))
                    place = Challenges.numbers(found.group.nonce)
                    book.arrive(name, sequence, *place)
                    book.settle(name, sequence)
        self.allocator = Allocator(self.config, task_at=lambda position: f"task {position % TASKS}")
        for number, metadata in enumerate(self.committed):
            self.allocator.commit(metadata.prompts, version=number + 1)
        self.allocator.resume(book.positions)
        self.issuer = CreditIssuer(
            self.bucket,
            self.config,
            self.ledger.copy(),
            epoch=1,
            granted=dict(status.credits) if status is not None else {},
            draws=book,
            allocator=self.allocator,
        )
        self.issuer.version = self.version
        self.buffer = RolloutBuffer(
            self.bucket,
            self.ledger,
            limit=self.issuer.staleness.limit,
            arrive=self.issuer.staleness.arrive,
            drawn=self.issuer.drawn,
            allocator=self.allocator,
            owed=self.issuer.owed,
        )
        self.batch = None
        self._observe()
        self.issuer.write("training")

    def _alive(self):
        return {worker.name for worker in self.workers if worker.alive}

    def _observe(self):
        self.buffer.poll([worker.name for worker in self.workers])
        begun = {one.name: (one.lease, one.first) for one in self.workers if one.alive}
        self.issuer.observe(self.buffer, self._alive(), begun)

    def tick(self):
        self.now += 1
        status = read_trainer(self.bucket)
        for worker in self.workers:
            if worker is not self.workers[0] and self.random.random() < self.mortality:
                self._die_or_return(worker)
            if worker.alive:
                self._work(worker, status)
        if self.random.random() < self.amnesia:
            self._start_trainer(read_trainer(self.bucket))
        self._train()

    def _die_or_return(self, worker):
        worker.alive = not worker.alive
        worker.running.clear()
        worker.started = 0
        if worker.alive:
            worker.lease, worker.first = worker.lease + 1, worker.stored

    def _work(self, worker, status):
        worker.version = status.version
        for entry in sorted(worker.running, key=lambda one: one[0]):
            finish, number, position, size, version = entry
            if finish <= self.now:
                worker.running.remove(entry)
                place = worker.name, worker.lease, number
                group = group_for(*place, position, size, version, self.random)
                key = keys.rollout(worker.name, worker.stored)
                assert self.bucket.create(key, encode_group(group))
                worker.stored += 1
        while len(worker.running) < worker.slots:
            number = worker.started
            if worker.first + number >= status.credits.get(worker.name, 0):
                break
            found = [
                (one.positions[one.numbers.index(number)], one.sizes[one.numbers.index(number)])
                for one in (status.draws or {}).get(worker.name, [])
                if one.lease == worker.lease and number in one.numbers
            ]
            if not found:
                break
            finish = self.now + self.random.randint(1, worker.slowness)
            worker.running.append((finish, number, *found[0], worker.version))
            worker.started += 1

    def _train(self):
        if self.batch is not None:
            if self.random.random() < 0.5:
                self._publish(self.batch)
                self.batch = None
            return
        self.buffer.poll([worker.name for worker in self.workers])
        self.batch = self.buffer.next_batch(
            self.issuer.staleness, version=self.version, alive=self._alive()
        )
        self._observe()
        self._write()

    def _write(self):
        """Grants, and measures what is outstanding after that."""
        before, credits_ = self._outstanding(), dict(self.issuer._credits)
        idle = not any(self.issuer._unstored().values())
        self.issuer.write()
        after = self._outstanding()
        if credits_ != self.issuer._credits:
            # Drops of a batch count until it is committed, so it may be more before as well.
            self.most_prompts = max(self.most_prompts, after[0] if after[0] > before[0] else 0)
            # Idle workers get one fill at a time in any case.
            if not idle and after[1] > before[1]:
                self.most_while_busy = max(self.most_while_busy, after[1])

    def _outstanding(self):
        unstored = self.issuer._unstored()
        return self.issuer.draws.outstanding(unstored, without=self.issuer._without)

    def _publish(self, batch):
        consumed = [(one.worker, one.sequence) for one in batch.taken]
        metadata = CommitMetadata(
            step=self.version + 1,
            consumed=consumed,
            dropped=ranges_of(batch.dropped),
            position=self.issuer.draws.next_position,
            parts=batch.parts,
            prompts=batch.prompts,
        )
        CommitMetadata.of(metadata.to_dict(), run="r", version=self.version + 1)
        self._check(batch)
        self.issuer.expect(self.version + 1, metadata)
        self.version += 1
        settle(self.ledger, metadata)
        self.committed.append(metadata)
        self.allocator.commit(batch.prompts, version=self.version)
        self.issuer.committed(self.version, "00")
        self.consumed += consumed
        self.dropped += batch.dropped
        self.ages += batch.staleness

    def _check(self, batch):
        """Every entry is one prompt's whole record."""
        assert sum(batch.parts) == len(batch.taken)
        assert len(batch.parts) == self.config.train.groups_per_step
        trained = [one for one in batch.prompts if one.verdict in ("train", "partial")]
        start = 0
        for count, record in zip(batch.parts, trained, strict=True):
            parts = batch.taken[start : start + count]
            start += count
            assert len({one.group.task for one in parts}) == 1
            rewards = [reward for one in parts for reward in rewards_of(one.group)]
            assert len(set(rewards)) > 1, "a prompt without a gradient was trained on"
            assert record.completions == sum(completions_of(one.group) for one in parts)
            assert record.successes == sum(rewards)

    def run(self, versions, *, patience=800):
        waited = 0
        while self.version < versions:
            before = self.version
            self.tick()
            waited = 0 if self.version > before else waited + 1
            assert waited < patience, f"stuck at version {self.version}"
        settled = self.consumed + self.dropped
        assert len(settled) == len(set(settled)), "a group was settled twice"
        assert max(self.ages) <= self.config.train.largest_age
        return self


def config_of(policy, *, staleness=1, groups=3, keeps="strict", **rules):
    train = TrainConfig(
        groups_per_step=groups,
        max_staleness=staleness,
        staleness=StalenessConfig(policy=keeps),
    )
    allocation = AllocationConfig(policy=policy, **rules)
    rollout = RolloutConfig(group_size=6, allocation=allocation)
    return RunConfig(name="simulated", train=train, rollout=rollout)


fleets = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**20),
    policy=st.sampled_from(["refill", "pilot", "knapsack"]),
    staleness=st.integers(0, 3),
    groups=st.integers(1, 4),
    sizes=fleets,
    mortality=st.sampled_from([0.0, 0.02, 0.1]),
    amnesia=st.sampled_from([0.0, 0.05]),
    stage=st.sampled_from([0, 2]),
    keeps=st.sampled_from(["strict", "requeue"]),
)
def test_nothing_is_lost_counted_twice_too_old_or_stuck(
    seed, policy, staleness, groups, sizes, mortality, amnesia, stage, keeps
):
    config = config_of(
        policy,
        staleness=staleness,
        groups=groups,
        keeps=keeps if staleness else "strict",
        pilot=3,
        largest=9,
        stage=stage,
        max_defers=1,
        defer_for=2,
    )
    workers = [PromptWorker(f"w{n}", slots, slow) for n, (slots, slow) in enumerate(sizes)]
    done = PromptSimulation(seed, config, workers, mortality=mortality, amnesia=amnesia).run(8)
    if not mortality and not amnesia:
        assert done.most_prompts <= done.allocator.prompts_limit
        assert done.most_while_busy <= done.allocator.completions_limit


def test_a_fill_of_a_dead_worker_goes_to_another_and_the_pilot_is_kept():
    config = config_of("pilot", groups=1, staleness=3, pilot=4, largest=8)
    workers = [PromptWorker("w0", 8, 1), PromptWorker("w1", 8, 1)]
    simulation = PromptSimulation(5, config, workers)
    filled = None
    for _ in range(200):
        simulation.tick()
        status = read_trainer(simulation.bucket)
        owed = [
            (name, one.positions[place])
            for name, leases in status.draws.items()
            for one in leases
            for place, number in enumerate(one.numbers)
            if one.parts[place] and number >= {w.name: w.started for w in workers}[name]
        ]
        if owed:
            filled = owed[0]
            break
    assert filled is not None, "no pilot was filled"
    dead = next(worker for worker in workers if worker.name == filled[0])
    simulation._die_or_return(dead)  # Between the pilot and its fill.
    for _ in range(60):
        simulation.tick()
    records = [one for m in simulation.committed for one in m.prompts if one.verdict == "train"]
    found = [one for one in records if one.position == filled[1]]
    assert [one.completions for one in found] == [8]
    assert [one.pilot for one in found] == [4]
    settled = simulation.consumed + simulation.dropped
    assert len(settled) == len(set(settled))


def test_deferred_prompts_are_tried_again_and_then_skipped_also_after_restarts():
    config = config_of("pilot", groups=2, pilot=4, largest=8, max_defers=2, defer_for=1)
    simulation = PromptSimulation(1, config, [PromptWorker("w0", 8, 2)], amnesia=0.1).run(30)
    records = [one for m in simulation.committed for one in m.prompts]
    hard = [one for one in records if one.position == 0]  # It never succeeds.
    verdicts = [one.verdict for one in hard]
    assert verdicts == ["defer", "defer", "skip"]
    assert [one.defers for one in hard] == [0, 1, 2]


def test_bands_pass_over_what_is_known_to_be_easy():
    bands = [{"up_to": 0.8, "weight": 1.0}, {"up_to": 1.0, "weight": 0.0}]
    config = config_of("pilot", groups=2, pilot=4, largest=8)
    allocation = {"policy": "pilot", "pilot": 4, "largest": 8, "bands": bands}
    rollout = msgspec.structs.replace(
        config.rollout, allocation=msgspec.convert(allocation, AllocationConfig)
    )
    config = msgspec.structs.replace(config, rollout=rollout)
    simulation = PromptSimulation(1, config, [PromptWorker("w0", 8, 2)]).run(30)
    passed = [p for m in simulation.committed for p in m.prompts if p.verdict == "pass"]
    easy = [one for one in passed if one.position % 3 == 2]
    assert len(easy) > 10
    assert len(easy) > 0.8 * len(passed), "others pass only if their luck was that good"
    assert not [one for one in passed if one.position % 3 == 0]
