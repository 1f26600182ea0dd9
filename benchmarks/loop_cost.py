"""Measures the cost of the loop: all work of a step that is neither model nor environment.

Both sides do what a worker and a trainer do, with their own functions, on a folder as the bucket.
Scripted tokens and the sampler's log-probabilities replace the model. ``deltawire bench sync``
measures coding and publishing weights.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import time
from dataclasses import dataclass

from benchmarks.scripted import ScriptedEngine, ScriptedTasks
from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.errors import BugError
from deltawire.events import Step
from deltawire.parity import ParityMeter
from deltawire.rl.control.credits import CreditIssuer, settle
from deltawire.rl.control.drop_bias import causes_of, failures_of, families_of
from deltawire.rl.control.rollout_buffer import Batch, RolloutBuffer
from deltawire.rl.rollout.episode import play_all, run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of
from deltawire.runtime.event_log import EventLog
from deltawire.store import Bucket, open_bucket
from deltawire.train.batch import collate
from deltawire.train.budget import divide
from deltawire.train.build import byte_tokenizer
from deltawire.train.step import advantages_of, batch_loss, totals_of
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger, ranges_of
from deltawire.wire.rollouts import encode_group

WORKER = "w0"
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class LoopCost:
    """Processor time of the cheapest step, all threads counted, in milliseconds a group; and the
    quickest step by the clock, which includes waiting for other work on the machine."""

    worker_ms: float
    trainer_ms: float
    clock_ms: float

    @property
    def total_ms(self) -> float:
        """Both sides' processor time."""
        return self.worker_ms + self.trainer_ms


def measure_loop_cost(config: RunConfig, *, steps: int = 10) -> LoopCost:
    """Times ``steps`` steps' groups, of one turn of ``rollout.max_tokens`` tokens an episode."""
    with tempfile.TemporaryDirectory(prefix="deltawire-cost-") as folder:
        bucket = open_bucket(folder, create=True)
        worker, trainer = _NullWorker(bucket, config), _NullTrainer(bucket, config)
        worked: list[float] = []
        trained: list[float] = []
        passed: list[float] = []
        for version in range(steps + WARM_UP_STEPS):
            clock, begun = time.perf_counter(), time.process_time()
            asyncio.run(worker.sample(config.train.groups_per_step, version))
            handed = time.process_time()
            trainer.step(version)
            worked.append(handed - begun)
            trained.append(time.process_time() - handed)
            passed.append(time.perf_counter() - clock)
        per_group = 1e3 / config.train.groups_per_step
        return LoopCost(
            worker_ms=min(worked[WARM_UP_STEPS:]) * per_group,
            trainer_ms=min(trained[WARM_UP_STEPS:]) * per_group,
            clock_ms=min(passed[WARM_UP_STEPS:]) * per_group,
        )


class _NullWorker:
    """Samples groups and stores them."""

    def __init__(self, bucket: Bucket, config: RunConfig) -> None:
        self._bucket = bucket
        self._config = config
        self._text = Text(byte_tokenizer())
        self._tasks = ScriptedTasks(turns=1)
        self._stored = 0
        self._log = EventLog(WORKER, lambda n, data: bucket.put(keys.events(WORKER, n), data))

    async def sample(self, count: int, version: int) -> None:
        """A step's groups, all at once."""
        rollout = self._config.rollout
        engine = ScriptedEngine(slots=count * rollout.group_size)
        engine.version = version
        tasks = [self._tasks.draw(self._stored + n) for n in range(count)]
        plays = [
            functools.partial(
                run_episode,
                engine,
                self._tasks.open(task),
                self._text,
                temperature=rollout.temperature,
                limits=EpisodeLimits.of(rollout),
            )
            for task in tasks
            for _ in range(rollout.group_size)
        ]
        episodes = await play_all(engine, plays, concurrent=len(plays))
        for number, task in enumerate(tasks):
            own = episodes[number * rollout.group_size : (number + 1) * rollout.group_size]
            group = group_of(WORKER, "nonce", task, rollout.temperature, own)
            if not self._bucket.create(keys.rollout(WORKER, self._stored), encode_group(group)):
                raise BugError("a fresh folder has groups")
            now = time.time()
            self._log.span("sample", now, now + 1e-6)
            self._stored += 1


class _NullTrainer:
    """Consumes groups, computes their loss, and settles them."""

    def __init__(self, bucket: Bucket, config: RunConfig) -> None:
        self._config = config
        self._ledger = Ledger()
        self._issuer = CreditIssuer(bucket, config, self._ledger.copy(), epoch=1, granted={})
        policy = self._issuer.staleness
        self._buffer = RolloutBuffer(bucket, self._ledger, limit=policy.limit, arrive=policy.arrive)
        self._log = EventLog("trainer", lambda n, data: bucket.put(keys.events("trainer", n), data))
        self._issuer.observe(self._buffer, {WORKER})
        self._issuer.write("training")

    def step(self, version: int) -> None:
        """Runs one step, from listing the bucket to granting the next credits."""
        self._buffer.poll([WORKER])
        batch = self._buffer.next_batch(self._issuer.staleness, version=version, alive={WORKER})
        self._issuer.observe(self._buffer, {WORKER})
        self._issuer.write()
        if batch is None:
            raise BugError("groups of a step are missing")
        loss = self._loss(batch, version)
        consumed = [(buffered.group.worker, buffered.sequence) for buffered in batch.taken]
        hashes = [buffered.hash for buffered in batch.taken]
        metadata = CommitMetadata(
            step=version + 1,
            consumed=consumed,
            dropped=ranges_of(batch.dropped),
            hashes=hashes,
            threads=1,
        )
        metadata.to_dict()
        self._issuer.expect(version + 1, metadata)
        settle(self._ledger, metadata)
        self._issuer.committed(version + 1, "")
        self._log.record(_step_event(batch, version, loss))

    def _loss(self, batch: Batch, version: int) -> float:
        groups = [buffered.group for buffered in batch.taken]
        budget = self._config.train.max_tokens_per_batch
        batches = [collate(groups, members) for members in divide(groups, budget=budget)[0]]
        totals = totals_of(groups, self._config)
        advantages = advantages_of(groups, self._config)
        meter = ParityMeter(self._config.parity, version)
        total = 0.0
        for part in batches:
            logprobs = part.sampler_logprobs_NC.clone().requires_grad_()
            keep = meter.measure(
                logprobs, part.sampler_logprobs_NC, part.loss_mask_NC, part.versions_NC
            )
            loss = batch_loss(self._config, part, logprobs, totals, advantages, keep_N=keep).loss
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        meter.result()
        return total


def _step_event(batch: Batch, version: int, loss: float) -> Step:
    return Step(
        process="trainer",
        at=time.time(),
        version=version + 1,
        groups=len(batch.taken),
        dropped=len(batch.drops),
        reward_mean=0.0,
        loss=loss,
        grad_norm=0.0,
        k3=0.0,
        ratio_max=1.0,
        clipped=0.0,
        staleness=batch.staleness,
        tokens=sum(buffered.group.tokens for buffered in batch.taken),
        seconds=0.0,
        families=families_of(batch),
        causes=causes_of(batch),
        failures=failures_of(batch),
    )


@dataclass(frozen=True)
class AtOnce:
    """``most`` episodes of ``turns`` turns were under way at once; all finished in ``seconds``."""

    most: int
    turns: int
    seconds: float


def measure_rollouts_at_once(*, episodes: int = 200, turns: int = 50) -> AtOnce:
    """Runs that many episodes at once in this process, each to its last turn.

    Raises `BugError` if any failed or ended early.
    """
    config = RunConfig(name="at-once")
    tasks = ScriptedTasks(turns)
    engine = ScriptedEngine(slots=episodes)
    text = Text(byte_tokenizer())
    limits = EpisodeLimits(max_tokens=24, max_turns=turns, context=engine.capacity)
    plays = [
        functools.partial(
            run_episode,
            engine,
            tasks.open(tasks.draw(number)),
            text,
            temperature=config.rollout.temperature,
            limits=limits,
        )
        for number in range(episodes)
    ]
    begun = time.perf_counter()
    finished = asyncio.run(play_all(engine, plays, concurrent=episodes))
    seconds = time.perf_counter() - begun
    for episode in finished:
        if episode.cause or sum(t.turns for t in episode.trajectories) != turns:
            raise BugError(f"an episode ended early: {episode.cause}")
    return AtOnce(min(tasks.most, engine.most), turns, seconds)
