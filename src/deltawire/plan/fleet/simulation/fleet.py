"""A whole fleet as events: a trainer, relays, readers that die and lag, rollouts with a long tail.

    trainer ── takes P finished rollouts ▶ trains ▶ copies ▶ (encode, put, commit meanwhile)
       ▲                                                                │ version
       │ finished rollouts                                              ▼
    engines ◀── credits: at most (S+1)·P rollouts outstanding    readers of each rank, then a swap

The age of a rollout is the version that is trained from minus the one that its engine held at its
start. Those older than S at a step are evicted; their credits are granted again. An engine that
dies loses the rollouts that it had under way, and these are granted again too. So every rollout
that was granted is trained on once, evicted, lost with its engine, or outstanding.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import simpy

from deltawire.plan.fleet.description import Described
from deltawire.plan.fleet.request import Faults, PlanRequest
from deltawire.plan.fleet.simulation.transfers import (
    Process,
    PublishingSide,
    ReadingSide,
    RelayingSide,
)


class SimulatedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a simulation. Seconds to the last reader are by region, over all versions.

    ``granted`` rollouts are ``trained`` on, ``evicted``, ``lost`` (and granted again), or
    ``outstanding``. ``idle_share`` is the trainer's time without enough of them. The first third of
    the steps, in which the queue fills, counts neither there nor in the period and mean staleness.

    Example::

        found = simulate_fleet(request, described, steps=10, seed=0)
        print(found.staleness_mean, found.last_reader_s)
    """

    steps: int
    seconds: float
    period_s: float
    idle_share: float
    staleness_mean: float
    staleness_max: int
    granted: int
    trained: int
    evicted: int
    lost: int
    outstanding: int
    trained_twice: int
    deaths: int
    mean_reader_s: dict[str, float]
    last_reader_s: dict[str, float]
    bytes_got: dict[str, float]


@dataclass
class _Rollout:
    number: int
    version: int


@dataclass
class _ServingEngine:
    """``tensor_parallel`` readers that swap together."""

    region: str
    first: int
    ranks: int
    slots: int
    version: int = 0
    alive: bool = True
    life: int = 0
    ready: dict[int, int] = field(default_factory=dict)
    under_way: dict[int, _Rollout] = field(default_factory=dict)

    def serves(self, life: int) -> bool:
        """Returns whether the engine is alive, and has not died since its life ``life``."""
        return self.alive and self.life == life


class FleetSimulation:
    """One run of the model; `simulate_fleet` is the usual way to call it."""

    def __init__(
        self,
        request: PlanRequest,
        described: Described,
        *,
        steps: int,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self._env = simpy.Environment()
        self._rng = random.Random(seed)
        self._request, self._amounts = request, described.amounts
        self._steps, self._faults = steps, faults or Faults()
        self._publishing = PublishingSide(self._env, described.writer)
        self._reading = {
            name: ReadingSide(self._env, readers, self._rng)
            for name, readers in described.readers.items()
        }
        self._relays = {
            name: RelayingSide(self._env, relay, self._rng)
            for name, relay in described.relays.items()
        }
        self._relayed: dict[str, simpy.Event] = {}
        self._engines = self._make_engines()
        self._slow = {
            (engine.first, engine.region, rank)
            for engine in self._engines
            for rank in range(engine.ranks)
            if self._rng.random() < self._faults.slow_share
        }
        rollouts = request.rollouts
        self._limit = (rollouts.max_staleness + 1) * rollouts.batch
        self._outstanding = 0
        self._waiting: list[simpy.Event] = []
        self._finished: list[tuple[int, int]] = []
        self._enough: simpy.Event | None = None
        self._version = 0
        self._newest = dict.fromkeys(self._reading, 0)
        self._published_at: dict[int, float] = {}
        self._reached: dict[str, dict[int, float]] = {name: {} for name in self._reading}
        self._numbers = 0
        self._ages: list[int] = []
        self._trained: set[int] = set()
        self._twice = self._evicted = self._lost = self._deaths = 0
        self._steady: list[tuple[float, float]] = []
        """When each step began to wait for rollouts, and how long it waited."""
        self._ended_s = 0.0
        self._sigma = _sigma_for(rollouts.tail)

    def run(self) -> SimulatedFleet:
        """Runs until the trainer has made its steps and the last version has arrived."""
        for engine in self._engines:
            for _ in range(engine.slots):
                self._env.process(self._slot(engine, engine.life))
            if self._faults.mean_life_s:
                self._env.process(self._die(engine))
        self._env.run(self._env.process(self._train()))
        trained_s = self._ended_s
        arrivals = [self._env.process(self._settle(name)) for name in self._reading]
        self._env.run(simpy.AllOf(self._env, arrivals))
        times = {
            name: [at - self._published_at[v] for v, at in reached.items()]
            for name, reached in self._reached.items()
        }
        first = self._steps // 3
        steady_s = max(trained_s - self._steady[first][0], 1e-9)
        ages = self._ages[first * self._request.rollouts.batch :]
        return SimulatedFleet(
            steps=self._steps,
            seconds=trained_s,
            period_s=steady_s / (self._steps - first),
            idle_share=sum(wait for _, wait in self._steady[first:]) / steady_s,
            staleness_mean=sum(ages) / len(ages),
            staleness_max=max(self._ages, default=0),
            granted=self._numbers,
            trained=len(self._trained),
            evicted=self._evicted,
            lost=self._lost,
            outstanding=self._outstanding,
            trained_twice=self._twice,
            deaths=self._deaths,
            mean_reader_s={n: sum(t) / max(len(t), 1) for n, t in times.items()},
            last_reader_s={n: max(t, default=math.nan) for n, t in times.items()},
            bytes_got={name: side.got for name, side in self._reading.items()},
        )

    def _make_engines(self) -> list[_ServingEngine]:
        slots = self._request.rollouts.per_engine
        return [
            _ServingEngine(region.name, first, region.tensor_parallel, slots * region.rollouts)
            for region in self._request.regions
            for first in range(0, region.accelerators, region.tensor_parallel)
        ]

    def _train(self) -> Process:
        rollouts = self._request.rollouts
        publishing: simpy.Event | None = None
        for _ in range(self._steps):
            started = self._env.now
            while len(self._finished) < rollouts.batch:
                self._enough = self._env.event()
                yield self._enough
                self._evict()
            self._steady.append((started, self._env.now - started))
            self._take(rollouts.batch)
            yield self._env.timeout(self._request.trainer.step_s)
            if publishing is not None and not publishing.processed:
                yield publishing
            yield self._env.timeout(self._publishing.copy_seconds(self._amounts))
            self._version += 1
            publishing = self._env.process(self._publish(self._version))
            self._evict()
        self._ended_s = self._env.now
        assert publishing is not None
        yield publishing

    def _take(self, count: int) -> None:
        """Trains on the rollouts that were granted first."""
        for _ in range(count):
            number, version = heapq.heappop(self._finished)
            self._twice += number in self._trained
            self._trained.add(number)
            self._ages.append(self._version - version)
            self._release()

    def _evict(self) -> None:
        """Drops finished rollouts that are too old for the next step."""
        oldest = self._version - self._request.rollouts.max_staleness
        kept = [one for one in self._finished if one[1] >= oldest]
        for _ in range(len(self._finished) - len(kept)):
            self._evicted += 1
            self._release()
        self._finished = kept
        heapq.heapify(self._finished)

    def _release(self) -> None:
        self._outstanding -= 1
        if self._waiting:
            self._waiting.pop().succeed()

    def _slot(self, engine: _ServingEngine, life: int) -> Process:
        """One place of an engine: one rollout after another, while there are credits."""
        rollouts = self._request.rollouts
        while engine.serves(life):
            if self._outstanding >= self._limit:
                credit = self._env.event()
                self._waiting.append(credit)
                yield credit
                if not engine.serves(life):
                    if self._waiting:  # Hands the place on, since this engine is gone.
                        self._waiting.pop().succeed()
                    return
                if self._outstanding >= self._limit:
                    continue
            self._outstanding += 1
            self._numbers += 1
            rollout = _Rollout(self._numbers, engine.version)
            engine.under_way[rollout.number] = rollout
            self._env.process(self._finish(engine, rollout))
            yield self._env.timeout(self._draw(rollouts.seconds))

    def _draw(self, mean_s: float) -> float:
        """Draws a time of this mean, lognormal."""
        return mean_s * math.exp(self._rng.gauss(-(self._sigma**2) / 2, self._sigma))

    def _finish(self, engine: _ServingEngine, rollout: _Rollout) -> Process:
        """Ends a rollout once the longest of its group has ended."""
        rollouts = self._request.rollouts
        yield self._env.timeout(self._draw(rollouts.tail * rollouts.seconds))
        if engine.under_way.pop(rollout.number, None) is None:
            return  # The engine died meanwhile; the rollout was counted as lost.
        heapq.heappush(self._finished, (rollout.number, rollout.version))
        enough = self._enough
        if len(self._finished) >= rollouts.batch and enough is not None and not enough.triggered:
            enough.succeed()

    def _die(self, engine: _ServingEngine) -> Process:
        while True:
            yield self._env.timeout(self._rng.expovariate(1 / self._faults.mean_life_s))
            engine.alive = False
            engine.life += 1
            self._deaths += 1
            for _ in range(len(engine.under_way)):
                self._lost += 1
                self._release()
            engine.under_way.clear()
            yield self._env.timeout(self._faults.restart_s)
            side = self._reading[engine.region]
            yield simpy.AllOf(
                self._env,
                [
                    self._env.process(side.read(self._amounts, engine.first + rank, whole=True))
                    for rank in range(engine.ranks)
                ],
            )
            engine.alive = True
            engine.version = max(engine.version, self._newest[engine.region])
            for _ in range(engine.slots):
                self._env.process(self._slot(engine, engine.life))

    def _publish(self, version: int) -> Process:
        started = self._env.now
        yield self._env.process(self._publishing.publish(self._amounts))
        self._published_at[version] = started
        for name in self._reading:
            self._env.process(self._arrive(name, version))

    def _arrive(self, name: str, version: int) -> Process:
        """Takes a version to a region's bucket, and then to every reader there."""
        if name in self._relays:  # One version after another.
            before = self._relayed.get(name)
            done = self._relayed[name] = self._env.event()
            if before is not None:
                yield before
            yield self._env.process(self._relays[name].relay(self._amounts))
            done.succeed()
        self._newest[name] = version
        engines = [engine for engine in self._engines if engine.region == name]
        yield simpy.AllOf(
            self._env,
            [
                self._env.process(self._read(engine, rank, version))
                for engine in engines
                for rank in range(engine.ranks)
            ],
        )
        self._reached[name][version] = self._env.now

    def _read(self, engine: _ServingEngine, rank: int, version: int) -> Process:
        if not engine.alive:
            return
        slow = (engine.first, engine.region, rank) in self._slow
        side = self._reading[engine.region]
        yield self._env.process(
            side.read(
                self._amounts,
                engine.first + rank,
                slowness=self._faults.slowness if slow else 1.0,
            )
        )
        engine.ready[version] = engine.ready.get(version, 0) + 1
        if engine.ready[version] == engine.ranks and engine.alive:
            engine.version = max(engine.version, version)
            del engine.ready[version]

    def _settle(self, name: str) -> Generator[simpy.Event, Any, None]:
        while len(self._reached[name]) < self._steps:
            yield self._env.timeout(1.0)


def _sigma_for(tail: float) -> float:
    """Returns the sigma of a lognormal spread of rollouts' times; longer tails spread more."""
    return min(1.0, 0.25 * math.log(tail) + 0.1)


def simulate_fleet(
    request: PlanRequest,
    described: Described,
    *,
    steps: int,
    seed: int = 0,
    faults: Faults | None = None,
) -> SimulatedFleet:
    """Simulates ``steps`` optimizer steps of a fleet; the same seed gives the same result."""
    return FleetSimulation(request, described, steps=steps, seed=seed, faults=faults).run()
