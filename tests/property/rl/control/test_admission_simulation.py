"""Credits, buffer and drops together, under a simulated clock.

Workers of different speeds take credits, finish groups out of order, die, come back under their
names; the trainer takes batches, trains for a while and commits a while later. All of the loop's
own accounting (`CreditIssuer`, `Admission`, `RolloutBuffer`, `Ledger`) is the real one, on a memory
bucket.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deltawire.config import (
    CorrectionConfig,
    LossConfig,
    RunConfig,
    StalenessConfig,
    TrainConfig,
)
from deltawire.rl.control.admission import Admission, WorkerLoad
from deltawire.rl.control.credits import CreditIssuer, settle
from deltawire.rl.control.rollout_buffer import RolloutBuffer, read_consumed
from deltawire.runtime.fleet import read_trainer
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger, ranges_of
from deltawire.wire.rollouts import encode_group


@dataclass
class FakeWorker:
    """A worker that samples up to ``slots`` groups at a time."""

    name: str
    slots: int
    slowness: int
    alive: bool = True
    version: int = 0
    started: int = 0
    stored: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)
    """(when it will be finished, version of its oldest token)"""


@dataclass
class Simulation:
    """One run; `tick` moves everything by one unit of time."""

    seed: int
    staleness: int
    groups_per_step: int
    workers: list[FakeWorker]
    make_group: object
    in_order: bool = False
    train_ticks: tuple[int, int] = (1, 3)
    commit_ticks: tuple[int, int] = (1, 3)
    lag_ticks: int = 2
    mortality: float = 0.0
    policy: str = "strict"
    amnesia: float = 0.0
    """How likely the trainer dies in a tick, with all but the bucket and its ledger."""

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.now = 0
        self.bucket = open_bucket("memory://")
        self.ledger = Ledger()
        train = TrainConfig(
            groups_per_step=self.groups_per_step,
            max_staleness=self.staleness,
            staleness=StalenessConfig(policy=self.policy),
            loss=LossConfig(ratio_base="old", corrections=[CorrectionConfig()]),
        )
        assert train.contradiction() is None
        self.config = RunConfig(name="simulated", train=train)
        self.bound = train.largest_age
        self._start_trainer({})
        self.version = 0
        self.resumes = 0
        self.batch = None
        self.trained_at = 0
        self.committing = None
        self.taken, self.dropped, self.staleness_seen = [], [], []
        self.credits = {}
        self.last_finish = 0
        self.started_while_training = 0
        self.immortal = self.workers[0].name
        self.issuer.observe(self.buffer, self._alive())
        self.issuer.write("training")

    def _start_trainer(self, granted):
        ledger = self.ledger.copy()
        self.issuer = CreditIssuer(self.bucket, self.config, ledger, epoch=1, granted=granted)
        policy = self.issuer.staleness
        assert policy.largest_age == self.bound
        self.buffer = RolloutBuffer(
            self.bucket, self.ledger, limit=policy.limit, arrive=policy.arrive
        )

    def _resume_trainer(self):
        """A batch that was not published is lost; a commit under way has happened."""
        status = read_trainer(self.bucket)
        self._start_trainer(dict(status.credits))
        self.issuer.version = self.version
        self.batch = self.committing = None
        self.resumes += 1
        alive = self._alive()
        self.buffer.poll([worker.name for worker in self.workers])
        self.issuer.observe(self.buffer, alive)
        self.issuer.write("training")

    def _alive(self):
        return {worker.name for worker in self.workers if worker.alive}

    def tick(self):
        self.now += 1
        status = read_trainer(self.bucket)
        for name, count in self.credits.items():
            assert status.credits[name] >= count, "credits went back"
        self.credits = dict(status.credits)
        for worker in self.workers:
            self._live_or_die(worker)
            if worker.alive:
                self._work(worker, status)
        if self.random.random() < self.amnesia:
            self._resume_trainer()
        self._train()

    def _live_or_die(self, worker):
        if worker.name == self.immortal or self.random.random() >= self.mortality:
            return
        worker.alive = not worker.alive
        worker.running.clear()
        worker.started = worker.stored

    def _work(self, worker, status):
        if worker.version < status.version and self.random.random() < 1 / (1 + self.lag_ticks):
            worker.version = status.version
        for finish, version in sorted(worker.running):
            if finish <= self.now:
                worker.running.remove((finish, version))
                data = encode_group(self.make_group(worker.name, [version]))
                assert self.bucket.create(keys.rollout(worker.name, worker.stored), data)
                worker.stored += 1
        while (
            worker.started < status.credits.get(worker.name, 0)
            and worker.version >= status.version
            and len(worker.running) < worker.slots
        ):
            finish = self.now + self.random.randint(1, worker.slowness)
            if self.in_order:
                finish = self.last_finish = max(finish, self.last_finish)
            worker.running.append((finish, worker.version))
            worker.started += 1
            self.started_while_training += self.batch is not None or self.committing is not None

    def _train(self):
        if self.committing is not None and self.committing <= self.now:
            self.issuer.committed(self.issuer.version + 1, "00")
            self.committing = None
        if self.batch is not None:
            if self.trained_at <= self.now and self.committing is None:
                self._publish(self.batch)
                self.batch = None
            return
        alive = self._alive()
        self.buffer.poll([worker.name for worker in self.workers])
        self.batch = self.buffer.next_batch(
            self.issuer.staleness, version=self.version, alive=alive
        )
        self.issuer.observe(self.buffer, alive)
        self.issuer.write()
        if self.batch is not None:
            self.trained_at = self.now + self.random.randint(*self.train_ticks)

    def _publish(self, batch):
        consumed = [(buffered.group.worker, buffered.sequence) for buffered in batch.taken]
        metadata = CommitMetadata(
            step=self.version + 1, consumed=consumed, dropped=ranges_of(batch.dropped)
        )
        self.issuer.expect(self.version + 1, metadata)
        self.version += 1
        settle(self.ledger, metadata)
        self.committing = self.now + self.random.randint(*self.commit_ticks)
        self.taken += consumed
        self.dropped += batch.dropped
        for buffered, age in zip(batch.taken, batch.staleness, strict=True):
            assert age == self.version - 1 - buffered.group.oldest_version
        self.staleness_seen += batch.staleness

    def run(self, versions, *, patience):
        """Tick until that many versions are made; ``patience`` bounds the wait for each."""
        waited = 0
        while self.version < versions:
            before = self.version
            self.tick()
            waited = 0 if self.version > before else waited + 1
            assert waited < patience, f"stuck at version {self.version}"
        settled = self.taken + self.dropped
        assert len(settled) == len(set(settled)), "a group was settled twice"
        assert min(self.staleness_seen) >= 0
        assert max(self.staleness_seen) <= self.bound
        return self


@pytest.fixture
def simulate(make_group):
    def run(versions=15, patience=300, **settings):
        return Simulation(make_group=make_group, **settings).run(versions, patience=patience)

    return run


fleets = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20)), min_size=1, max_size=4)


def fleet(sizes):
    return [FakeWorker(f"w{n}", slots, slow) for n, (slots, slow) in enumerate(sizes)]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    staleness=st.integers(0, 4),
    groups=st.integers(1, 5),
    sizes=fleets,
    mortality=st.sampled_from([0.0, 0.02, 0.2]),
    policy=st.sampled_from(["strict", "windowed_fifo", "requeue"]),
    amnesia=st.sampled_from([0.0, 0.05]),
)
def test_no_group_is_too_old_and_nothing_deadlocks(
    make_group, seed, staleness, groups, sizes, mortality, policy, amnesia
):
    assume(staleness > 0 or policy == "strict")
    Simulation(
        policy=policy,
        amnesia=amnesia,
        seed=seed,
        staleness=staleness,
        groups_per_step=groups,
        workers=fleet(sizes),
        make_group=make_group,
        mortality=mortality,
    ).run(12, patience=500)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    staleness=st.integers(0, 4),
    groups=st.integers(1, 5),
    sizes=fleets,
)
def test_what_finishes_in_order_is_never_dropped(make_group, seed, staleness, groups, sizes):
    """The derivation's own case: workers that start what they are granted at once, and groups
    that finish in the order in which they were started, however long each takes."""
    workers = [FakeWorker(f"w{n}", 10**6, slow) for n, (_, slow) in enumerate(sizes)]
    simulation = Simulation(
        seed=seed,
        staleness=staleness,
        groups_per_step=groups,
        workers=workers,
        make_group=make_group,
        in_order=True,
        lag_ticks=0,
    ).run(12, patience=500)
    assert simulation.dropped == []
    assert simulation.buffer.dropping()["w0"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_staleness_zero_alternates_strictly(simulate, seed):
    """Nothing is started between a batch and its commit, and nothing is ever thrown away."""
    done = simulate(
        seed=seed, staleness=0, groups_per_step=4, workers=fleet([(3, 5), (2, 12), (1, 2)])
    )
    assert set(done.staleness_seen) == {0}
    assert done.started_while_training == 0
    assert done.dropped == []


def test_sampling_and_training_overlap_from_staleness_one_on(simulate):
    done = simulate(seed=0, staleness=1, groups_per_step=4, workers=fleet([(4, 4), (4, 4)]))
    assert done.started_while_training > 0
    assert set(done.staleness_seen) == {0, 1}


def test_only_the_slow_are_dropped(simulate):
    done = simulate(
        versions=120,
        seed=1,
        staleness=1,
        groups_per_step=4,
        workers=[FakeWorker("w0", 4, 3), FakeWorker("w1", 4, 400)],
        patience=900,
    )
    assert len(done.dropped) >= 3
    assert {worker for worker, _ in done.dropped} == {"w1"}


def test_the_dead_hold_no_claim(make_group):
    """Seven of eight workers take most of the credits and die before they finish a group."""
    workers = fleet([(10, 2)] + [(10, 10**6)] * 7)
    simulation = Simulation(
        seed=2, staleness=2, groups_per_step=8, workers=workers, make_group=make_group
    )
    for _ in range(3):
        simulation.tick()
    assert sum(len(worker.running) for worker in workers[1:]) == 21
    for worker in workers[1:]:
        worker.alive = False
        worker.running.clear()
    simulation.run(5, patience=100)
    assert workers[0].stored >= 40


MIXED = {"versions": 120, "groups_per_step": 4, "patience": 900}


def mixed(slowness):
    """A worker of quick tasks, and one whose tasks take up to ``slowness`` ticks."""
    return [FakeWorker("w0", 4, 3), FakeWorker("w1", 4, slowness)]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    staleness=st.integers(1, 4),
    groups=st.integers(1, 5),
    sizes=fleets,
)
def test_the_windowed_fifo_drops_nothing_and_keeps_its_bound(
    make_group, seed, staleness, groups, sizes
):
    """The case of the derivation: no worker dies. Groups take from one tick to any number."""
    done = Simulation(
        seed=seed,
        staleness=staleness,
        groups_per_step=groups,
        workers=fleet(sizes),
        make_group=make_group,
        policy="windowed_fifo",
    ).run(15, patience=500)
    assert done.dropped == []


def test_the_windowed_fifo_reaches_its_bound(simulate):
    """The bound is not merely safe: with a straggler some group is as old as it allows."""
    ages = [
        max(
            simulate(
                **MIXED, seed=seed, staleness=1, workers=mixed(40), policy="windowed_fifo"
            ).staleness_seen
        )
        for seed in range(2)
    ]
    assert max(ages) == 2


def test_slow_tasks_are_trained_on_as_often_as_they_finish(simulate):
    """Strict drops late groups, requeueing trains on them, and the windowed FIFO waits for them."""
    kept = {}
    for policy in ("strict", "windowed_fifo", "requeue"):
        done = simulate(**MIXED, seed=1, staleness=2, workers=mixed(30), policy=policy)
        slow = [worker for worker, _ in done.taken if worker == "w1"]
        lost = [worker for worker, _ in done.dropped if worker == "w1"]
        kept[policy] = len(slow) / (len(slow) + len(lost))
    assert kept["strict"] < 0.9
    assert kept["windowed_fifo"] == 1.0
    assert kept["requeue"] > kept["strict"]


def test_a_requeued_group_that_was_kept_is_never_dropped_later(simulate, monkeypatch):
    waited, dropped = set(), set()
    take = RolloutBuffer.next_batch

    def watched(buffer, policy, **settings_):
        batch = take(buffer, policy, **settings_)
        waited.update((p.group.worker, p.sequence) for p in buffer._requeued)
        dropped.update(batch.dropped if batch else ())
        return batch

    monkeypatch.setattr(RolloutBuffer, "next_batch", watched)
    done = simulate(**MIXED, seed=2, staleness=1, workers=mixed(60), policy="requeue")
    assert len(waited) > 10
    assert not waited & dropped
    assert dropped
    assert max(done.staleness_seen) > 1


def test_requeued_groups_are_a_bounded_share_of_a_step(simulate, monkeypatch):
    old = []
    take = RolloutBuffer.next_batch

    def watched(buffer, policy, **settings_):
        batch = take(buffer, policy, **settings_)
        if batch is not None:
            old.append(sum(age > policy.max_staleness for age in batch.staleness))
        return batch

    monkeypatch.setattr(RolloutBuffer, "next_batch", watched)
    simulate(
        versions=60,
        patience=900,
        seed=3,
        staleness=1,
        groups_per_step=8,
        workers=mixed(40),
        policy="requeue",
    )
    assert max(old) == 2  # a quarter of 8


def test_after_a_resume_the_first_step_knows_how_old_its_groups_are(make_group):
    """Groups stored under the trainer before this one are aged by the version resumed from."""
    simulation = Simulation(
        seed=5, staleness=3, groups_per_step=4, workers=fleet([(6, 4)]), make_group=make_group
    )
    while simulation.version < 4:
        simulation.tick()
    simulation._resume_trainer()
    first = len(simulation.staleness_seen)
    outstanding = simulation.issuer.staleness._admission.outstanding(simulation.issuer._loads())
    assert outstanding <= simulation.issuer.staleness.limit
    while simulation.version < 5:
        simulation.tick()
    ages = simulation.staleness_seen[first:]
    stored = [
        buffered.oldest
        for buffered in read_consumed(
            simulation.bucket, CommitMetadata(consumed=simulation.taken[first : first + 4])
        )
    ]
    assert ages == [4 - oldest for oldest in stored]
    assert max(ages) >= 1


loads = st.builds(
    lambda settled, stored, granted, alive: WorkerLoad(
        granted=settled + stored + granted, stored=settled + stored, settled=settled, alive=alive
    ),
    st.integers(0, 50),
    st.integers(0, 10),
    st.integers(0, 10),
    st.booleans(),
)


@given(
    st.dictionaries(st.sampled_from("abcdef"), loads, max_size=5),
    st.integers(1, 6),
    st.integers(0, 4),
)
def test_grants_fill_the_limit_and_never_pass_it(workers, groups, staleness):
    admission = Admission(groups_per_step=groups, max_staleness=staleness)
    before = admission.outstanding(workers)
    assert before == sum(
        (load.granted - load.settled) if load.alive else (load.stored - load.settled)
        for load in workers.values()
    )
    granted = admission.grant(workers)
    assert granted.keys() == workers.keys()
    new = sum(granted[name] - load.granted for name, load in workers.items())
    assert all(granted[name] >= load.granted for name, load in workers.items())
    assert all(granted[name] == load.granted for name, load in workers.items() if not load.alive)
    if any(load.alive for load in workers.values()):
        assert before + new == max(before, (staleness + 1) * groups)
    else:
        assert new == 0
    unfinished = {name: granted[name] - load.stored for name, load in workers.items() if load.alive}
    for name, count in unfinished.items():
        if granted[name] > workers[name].granted:  # it got one: no worker had fewer at that moment
            assert count - 1 <= min(unfinished.values())
    assert admission.grant(workers) == granted
