"""Simulates the idle time of a trainer for agents of one to fifty turns, on a simulated clock.

The staleness policy, with its admission and its bookkeeping, is the loop's; workers, trainer and
durations are simulated:

- an episode has a number of turns from a Pareto law of exponent 1.1, cut at fifty: more than
  half have a single one, one in seventy all fifty; a turn takes a log-normal time, median 2 s,
  sigma 0.6; a group takes as long as its slowest episode.
- a step takes 60 s, a commit 2 s more, and a worker holds a version 3 s after its commit.

There are enough workers to sample 1.5 times as fast as training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from deltawire.config import TrainConfig
from deltawire.rl.control.admission import WorkerLoad
from deltawire.rl.control.staleness import StalenessPolicy, policy_of

MAX_TURNS = 50
EXPONENT = 1.1
TURN_MEDIAN_S = 2.0
TURN_SIGMA = 0.6
GROUP_SIZE = 8
STEP_S = 60.0
COMMIT_S = 2.0
FOLLOW_S = 3.0
TICK_S = 0.5
WARM_UP_STEPS = 10
SPARE = 1.5


@dataclass(frozen=True)
class SimulatedIdle:
    """Shares of the time after the first steps. ``dropped`` is the share of finished groups that
    were too old, ``slots`` how many groups all workers play at once."""

    trainer_idle: float
    dropped: float
    oldest: int
    slots: int


@dataclass
class _Group:
    worker: str
    oldest: int
    ends_at: float
    place: int = 0


@dataclass
class _Worker:
    name: str
    slots: int
    version: int = 0
    started: int = 0
    stored: int = 0
    running: list[_Group] = field(default_factory=list)


def draw_group_s(rng: random.Random) -> float:
    """The duration of a group, which is that of its slowest episode."""
    return max(_draw_episode_s(rng) for _ in range(GROUP_SIZE))


def _draw_episode_s(rng: random.Random) -> float:
    turns = min(MAX_TURNS, int(rng.paretovariate(EXPONENT)))
    return sum(TURN_MEDIAN_S * rng.lognormvariate(0, TURN_SIGMA) for _ in range(turns))


def simulate_idle(train: TrainConfig, *, steps: int = 100, seed: int = 0) -> SimulatedIdle:
    """Trains ``steps`` versions under ``train``'s staleness, with as many workers as are needed."""
    rng = random.Random(seed)
    mean = sum(draw_group_s(rng) for _ in range(2000)) / 2000
    slots = max(1, round(SPARE * train.groups_per_step * mean / STEP_S))
    return _Simulation(train, slots, rng).run(steps)


class _Simulation:
    def __init__(self, train: TrainConfig, slots: int, rng: random.Random) -> None:
        self.policy: StalenessPolicy = policy_of(train)
        self.rng = rng
        self.now = 0.0
        self.workers = [_Worker(f"w{n}", 4) for n in range(-(-slots // 4))]
        self.names = {worker.name for worker in self.workers}
        self.credits: dict[str, int] = dict.fromkeys(self.names, 0)
        self.settled: dict[str, int] = dict.fromkeys(self.names, 0)
        self.waiting: list[_Group] = []
        self.requeued: list[_Group] = []
        self.version = self.committed = 0
        self.training: list[_Group] = []
        self.trained_at = self.committed_at = 0.0
        self.commits: list[tuple[float, int, list[_Group]]] = []
        self.waited = 0.0
        self.finished = self.dropped = self.oldest = 0

    def run(self, steps: int) -> SimulatedIdle:
        counted_from = 0.0
        while self.version < steps:
            before = self.version
            self._tick()
            if before < WARM_UP_STEPS <= self.version:
                counted_from, self.waited = self.now, 0.0
        return SimulatedIdle(
            trainer_idle=self.waited / (self.now - counted_from),
            dropped=self.dropped / max(self.finished, 1),
            oldest=self.oldest,
            slots=4 * len(self.workers),
        )

    def _tick(self) -> None:
        self.now += TICK_S
        self._commit()
        self._admit()
        for worker in self.workers:
            self._work(worker)
        self._train()

    def _commit(self) -> None:
        while self.commits and self.commits[0][0] <= self.now:
            self.committed_at, self.committed, groups = self.commits.pop(0)
            for group in groups:
                self.settled[group.worker] += 1

    def _admit(self) -> None:
        held = dict.fromkeys(self.names, 0)
        for group in self.requeued:
            held[group.worker] += 1
        loads = {
            w.name: WorkerLoad(
                granted=self.credits[w.name],
                stored=w.stored,
                settled=self.settled[w.name] + held[w.name],
                alive=True,
            )
            for w in self.workers
        }
        self.credits = self.policy.admit(loads, version=self.committed)

    def _work(self, worker: _Worker) -> None:
        if self.now >= self.committed_at + FOLLOW_S:
            worker.version = self.committed
        for group in [g for g in worker.running if g.ends_at <= self.now]:
            worker.running.remove(group)
            worker.stored += 1
            self.finished += 1
            group.place = self.policy.arrive(worker.name, group.oldest)
            self.waiting.append(group)
        while (
            worker.started < self.credits[worker.name]
            and worker.version >= self.committed
            and len(worker.running) < worker.slots
        ):
            worker.started += 1
            ends_at = self.now + draw_group_s(self.rng)
            worker.running.append(_Group(worker.name, worker.version, ends_at))

    def _train(self) -> None:
        if self.training:
            if self.now < self.trained_at:
                return
            self.version += 1
            self.commits.append((self.now + COMMIT_S, self.version, self.training))
            self.training = []
        choice = self.policy.choose(
            self.waiting, self.requeued, version=self.version, alive=self.names
        )
        gone = {id(group) for group in (*choice.taken, *choice.evicted, *choice.requeued)}
        self.waiting = [group for group in self.waiting if id(group) not in gone]
        self.requeued = choice.requeued
        for group in choice.evicted:
            self.settled[group.worker] += 1
        self.dropped += len(choice.evicted)
        if choice.taken:
            self.training = choice.taken
            self.trained_at = self.now + STEP_S
            self.oldest = max(self.oldest, *(self.version - g.oldest for g in choice.taken))
        else:
            self.waited += TICK_S
