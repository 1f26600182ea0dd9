"""A rollout worker: follows the weights, samples groups while it has credits, stores them.

Who waits for whom::

    follower's thread    prepares the next version            ┐
    liaison's thread     reads trainer.json, writes heartbeat ├─▶ serving loop: swap, start
    uploader's thread ◀─ finished groups, one put each        ┘   groups, decode one step

The serving loop never waits for the bucket. An engine outside fetches its weights itself: then the
follower brings versions and digests alone, and the swap is waited for in a thread. A worker that
dies costs the groups it had not finished: what it stored is counted from the bucket when it comes
back under the same name.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltawire.codec import Digest
from deltawire.config import RunConfig
from deltawire.engines.base import Sampler, Weights
from deltawire.engines.live import LiveWeights
from deltawire.engines.models import empty_model, load_tokenizer, serve_as, stop_tokens
from deltawire.engines.text import Text
from deltawire.engines.transformers import IDLE_S, TransformersEngine
from deltawire.errors import BugError, DeltawireError, FencedError, InputError, RetryError
from deltawire.events import Generated, Swapped
from deltawire.rl.desk import read_heartbeat, read_trainer
from deltawire.rl.envs import TaskSource, open_tasks
from deltawire.rl.episode import Limits, group_of, run_episode
from deltawire.rl.failures import Failures
from deltawire.rl.process import RUN_PATIENCE_S, Process, fetch_model_files, open_run
from deltawire.rl.pulse import read_pulse
from deltawire.store import Bucket
from deltawire.sync import Follower, Mirror, Steps, Subscriber, Update, load_mirror
from deltawire.sync.chain import with_retries
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import MAX_GROUP_BYTES, Group, decode_group, encode_group
from deltawire.wire.run import Run
from deltawire.wire.status import Heartbeat, TrainerStatus, WorkerPhase

HEARTBEAT_S = 1.0
SAY_EVERY_S = 10.0


class Liaison(threading.Thread):
    """Keeps the latest ``trainer.json`` at hand and the worker's own heartbeat fresh.

    A store that does not answer leaves what is at hand as it was; ``error`` holds anything that
    waiting will not mend.
    """

    def __init__(self, bucket: Bucket, beat: Callable[[], Heartbeat]) -> None:
        super().__init__(name="liaison", daemon=True)
        self.status: TrainerStatus | None = None
        self.error: DeltawireError | None = None
        self.heard_at = time.monotonic()
        """When the trainer last gave a sign of life that was new, by this process's clock."""
        self._heard = (0.0, -1)
        self._bucket = bucket
        self._beat = beat
        self._closed = threading.Event()

    def run(self) -> None:
        """The thread itself."""
        beaten = float("-inf")
        while not self._closed.is_set():
            try:
                self.status = read_trainer(self._bucket) or self.status
                if time.monotonic() - beaten >= HEARTBEAT_S:
                    self.beat_now()
                    beaten = time.monotonic()
                    self._listen()
            except RetryError:
                self._closed.wait(1.0)
            except DeltawireError as error:
                self.error = error
                return
            self._closed.wait(self._bucket.poll_s)

    def _listen(self) -> None:
        pulse = read_pulse(self._bucket, "trainer")
        sign = (
            self.status.at if self.status else 0.0,
            pulse.beat if pulse is not None and not pulse.stuck else self._heard[1],
        )
        if sign != self._heard:
            self._heard, self.heard_at = sign, time.monotonic()

    def beat_now(self) -> None:
        """Write the heartbeat."""
        beat = self._beat()
        self._bucket.put(keys.heartbeat(beat.worker), encode_json(beat))

    def close(self) -> None:
        """Stop."""
        self._closed.set()
        if self.is_alive():
            self.join(timeout=30)


class Uploader(threading.Thread):
    """Stores finished groups in sequence, each by one create, and tells how many there are."""

    def __init__(self, bucket: Bucket, worker: str, first: int, process: Process) -> None:
        super().__init__(name="uploader", daemon=True)
        self.stored = first
        self.error: DeltawireError | None = None
        self._bucket = bucket
        self._worker = worker
        self._process = process
        self._queue: queue.Queue[Group | None] = queue.Queue()

    def submit(self, group: Group) -> None:
        """Hand over a finished group."""
        self._queue.put(group)

    def run(self) -> None:
        """The thread itself."""
        while (group := self._queue.get()) is not None:
            try:
                data = encode_group(group)
                with_retries(lambda data=data, group=group: self._store(group, data))  # type: ignore[misc]
            except DeltawireError as error:
                self.error = error
                return
            except Exception as error:  # A thread that ends in silence stores nothing ever after.
                fault = f"cannot store a group: {type(error).__name__}: {error}"
                self.error = BugError(fault, run=self._bucket.url)
                return
            versions = sorted({int(v) for t in group.trajectories for v in t.versions_T})
            sound = [t.reward for t in group.trajectories if not t.cause]
            causes = [t.cause for t in group.trajectories if t.cause]
            self._process.events.record(
                Generated(
                    process=self._worker,
                    at=time.time(),
                    sequence=self.stored,
                    versions=versions,
                    reward_mean=float(np.mean(sound)) if sound else 0.0,
                    tokens=group.tokens,
                    failed=len(causes),
                    cause=causes[0] if causes else "",
                )
            )
            self.stored += 1
            self._process.heart.achieve()

    def _store(self, group: Group, data: bytes) -> None:
        """Create the next object. One that is already there is this put's own, seen late; or was
        still on its way when the process before this one died, and this one's is the next; or
        another process's under the same name: then this one stops."""
        while True:
            self._process.heart.confirm()
            key = keys.rollout(self._worker, self.stored)
            if self._bucket.create(key, data):
                return
            there = self._bucket.get(key, limit=MAX_GROUP_BYTES)
            if there is None:
                raise RetryError("a group is gone again", run=self._bucket.url, key=key)
            if decode_group(there, run=self._bucket.url, key=key).nonce == group.nonce:
                return
            if not self._process.heart.confirm(anew=True):
                raise FencedError(
                    f"another process stores groups as worker {self._worker}",
                    hint="give each worker its own --id",
                    run=self._bucket.url,
                    key=key,
                )
            self.stored += 1

    def close(self) -> None:
        """Store what was handed over, then stop."""
        self._queue.put(None)
        if self.is_alive():
            self.join(timeout=60)


async def _nothing_to_close() -> None:
    pass


@dataclass
class Served:
    """The model being served and everything that samples from it."""

    engine: Sampler
    live: Weights
    text: Text
    tasks: TaskSource
    close: Callable[[], Awaitable[None]] = _nothing_to_close
    outside: bool = False
    """Whether another process serves it, which goes on while it takes up a version."""


def serve_model(
    process: Process,
    run: Run,
    config: RunConfig,
    *,
    seed: int,
    slots: int | None = None,
    at: int | None = None,
    record_routes: bool = False,
) -> tuple[Served, Subscriber]:
    """Build the run's model, load version ``at`` (the newest if None) and put an engine on it,
    which tells its expert choices if asked to.

    Waits for version 0 if nothing is committed yet.
    """
    bucket = process.bucket
    torch.set_num_threads(config.threads)
    with fetch_model_files(bucket, run) as folder:
        model: Any = serve_as(empty_model(Path(folder)), config.rollout.precision)
        tokenizer = load_tokenizer(Path(folder))
    mirror = await_mirror(process, run, at=at)
    live = LiveWeights(model, run.tensors)
    live.load(mirror)
    engine = TransformersEngine(
        model,
        stop_tokens=stop_tokens(model, tokenizer),
        slots=slots or config.rollout.slots,
        capacity=config.rollout.context,
        seed=seed,
        version=mirror.version,
        record_routes=record_routes,
    )
    tasks = open_tasks(config.task, seed=config.seed)
    return Served(engine, live, Text(tokenizer), tasks), Subscriber(bucket, run, mirror)


def await_mirror(process: Process, run: Run, *, at: int | None = None) -> Mirror:
    """Version ``at``, or the newest if None; waits for version 0 if nothing is committed yet."""
    bucket = process.bucket
    deadline = time.monotonic() + RUN_PATIENCE_S
    while (mirror := load_mirror(bucket, run, at=at)) is None:
        if process.stopping or time.monotonic() > deadline:
            raise InputError("the run has no version 0", run=bucket.url)
        process.wait(bucket.poll_s)
    return mirror


def follow(steps: Steps, served: Served) -> Follower:
    """A follower that stages each update for the weights being served."""

    def stage(update: Update) -> None:
        served.live.stage(update.patches, update.version, update.digest)

    return Follower(steps, stage=stage)


def swap(served: Served, follower: Follower, process: Process) -> None:
    """Take up the prepared version, if there is one: between two steps, attested, or not at all."""
    update: Update | None = follower.take()
    if update is None:
        return
    began = process.events.now()
    started = time.perf_counter()
    served.live.swap(update.patches, update.version, update.digest)
    served.engine.version = update.version
    swap_ms = (time.perf_counter() - started) * 1e3
    follower.commit(update)
    process.events.span("swap", began)
    process.events.record(
        Swapped(
            process=process.name,
            at=time.time(),
            version=update.version,
            running=served.engine.active,
            swap_ms=swap_ms,
            prepare_ms=update.prepare_ms,
        )
    )


class Worker:
    """One worker's serving loop."""

    def __init__(
        self, process: Process, run: Run, config: RunConfig, *, say: Callable[[str], None]
    ) -> None:
        self.process = process
        self._say = say
        self._said_at = time.monotonic()
        self.config = config
        bucket = process.bucket
        first = len(bucket.list(keys.rollouts_of(process.name)))
        self._refuse_twin()
        seed = int.from_bytes(process.nonce.encode()[:6], "little") ^ config.seed
        steps: Steps
        if config.rollout.engine == "vllm":
            from deltawire.rl.outside import serve_outside

            self.served, steps = serve_outside(process, run, config, seed=seed)
        else:
            self.served, steps = serve_model(
                process, run, config, seed=seed, record_routes=config.parity.routes != "off"
            )
        self.phase: WorkerPhase = "sampling"
        self.attested: Digest | None = None
        self.follower = follow(steps, self.served)
        self.liaison = Liaison(bucket, self._beat)
        self.uploader = Uploader(bucket, process.name, first, process)
        self._first = first
        self._started = first
        self._drawn = 0
        self._groups: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failures = Failures(config.rollout, process.name)

    def _refuse_twin(self) -> None:
        """Raise `FencedError` if another living process has this worker's name."""
        bucket, name = self.process.bucket, self.process.name
        before = read_heartbeat(bucket, keys.heartbeat(name))
        if before is None or before.phase in ("stopped", "finished") or self.process.supervised:
            return
        self.process.wait(2.5 * HEARTBEAT_S)
        after = read_heartbeat(bucket, keys.heartbeat(name))
        if after is not None and after.at != before.at:
            raise FencedError(
                f"a worker named {name} is alive in this run",
                hint="give this one another --id",
                run=bucket.url,
            )

    def _beat(self) -> Heartbeat:
        live, status = self.served.live, self.liaison.status
        return Heartbeat(
            worker=self.process.name,
            nonce=self.process.nonce,
            phase=self.phase,
            version=live.version,
            digest=(self.attested or live.digest).hex(),
            attested=self.attested is not None,
            lag=max(0, (status.version if status else 0) - live.version),
            stored=self.uploader.stored,
            supervised=self.process.supervised,
            host=self.process.host,
            pid=os.getpid(),
            started_at=self.process.started_at,
            at=time.time(),
            stuck=self.process.heart.stuck,
        )

    async def serve(self, *, patience_s: float) -> None:
        """Sample until the run is finished, or until told to stop, or until the trainer has been
        stopped for ``patience_s``."""
        for thread in (self.follower, self.liaison, self.uploader):
            thread.start()
        try:
            await self._serve(patience_s)
        finally:
            for task in list(self._groups):
                task.cancel()
            await asyncio.gather(*self._groups, return_exceptions=True)
            self.served.engine.cancel_all()
            await self.served.close()
            self.uploader.close()
            self.follower.close()
            self.liaison.close()
            self.phase = "finished" if self.phase == "finished" else "stopped"
            with_retries(self.liaison.beat_now)

    async def _serve(self, patience_s: float) -> None:
        training_at = time.monotonic()
        while not self.process.stopping:
            self.process.heart.mark("sample" if self._groups else "wait")
            for part in (self.liaison, self.uploader):
                if part.error is not None:
                    raise part.error
            if self._failure is not None:
                raise self._failure
            if self.served.outside:
                await asyncio.to_thread(swap, self.served, self.follower, self.process)
            else:
                swap(self.served, self.follower, self.process)
            status = self.liaison.status
            if status is not None and status.phase == "finished":
                if self._finish(status):
                    return
            elif status is not None and status.phase == "training":
                training_at = self.liaison.heard_at
                self._start_groups(status)
            if time.monotonic() - training_at > patience_s:
                raise RetryError(
                    f"the trainer has not been training for {patience_s:.0f} s",
                    hint="continue the run with deltawire run, then start this worker again",
                    run=self.process.bucket.url,
                )
            await self._advance()
            if time.monotonic() - self._said_at > SAY_EVERY_S:
                self.say_how_it_stands()
        self.phase = "stopped"

    def say_how_it_stands(self) -> None:
        """One line for a person."""
        self._said_at = time.monotonic()
        status, live = self.liaison.status, self.served.live
        lag = max(0, (status.version if status else 0) - live.version)
        doing = self.phase if status is None or status.phase == "training" else status.phase
        stored = self.uploader.stored - self._first
        failed = f", {self._failures.count} episodes failed" if self._failures.count else ""
        self._say(f"version {live.version}, lag {lag}, {stored} groups stored{failed}, {doing}")

    async def _advance(self) -> None:
        """One engine step, or a short sleep if there is nothing to do."""
        events, engine = self.process.events, self.served.engine
        began = events.now()
        if engine.active:
            await engine.advance()
            events.span("sample", began)
        else:
            # Environments that work elsewhere will want the engine any moment.
            await asyncio.sleep(IDLE_S if self._groups else self.process.bucket.poll_s / 4)
            events.span("wait", began)

    def _start_groups(self, status: TrainerStatus) -> None:
        rollout = self.config.rollout
        granted = status.credits.get(self.process.name, 0)
        concurrent = rollout.concurrent or self.served.engine.slots
        free = concurrent - len(self._groups) * rollout.group_size
        while (
            self._started < granted
            and self.served.live.version >= status.version
            and (free >= rollout.group_size or not self._groups)
        ):
            free -= rollout.group_size
            self._started += 1
            task = asyncio.get_running_loop().create_task(self._sample_group(self._drawn))
            self._drawn += 1
            self._groups.add(task)
            task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error

    async def _sample_group(self, number: int) -> None:
        rollout, limits = self.config.rollout, Limits.of(self.config.rollout)
        task = self.served.tasks.draw(f"{self.process.name}-{self.process.nonce}", number)
        episodes = await asyncio.gather(
            *(
                run_episode(
                    self.served.engine,
                    self.served.tasks.open(task),
                    self.served.text,
                    temperature=rollout.temperature,
                    limits=limits,
                )
                for _ in range(rollout.group_size)
            )
        )
        self._failures.see(task, episodes)
        process = self.process
        self.uploader.submit(
            group_of(process.name, process.nonce, task, rollout.temperature, episodes)
        )

    def _finish(self, status: TrainerStatus) -> bool:
        """At the last version, recompute the digest from the serving weights; else keep going."""
        if self.served.live.version < status.version:
            return False
        self.attested = self.served.live.attest()
        self.phase = "finished"
        return True


def run_worker(process: Process, *, patience_s: float, say: Callable[[str], None]) -> None:
    """The worker process, from its start to the run's end or a signal.

    ``say`` takes a line for a person: on joining, every so often, and at the end.
    """
    started = time.time()
    process.tell("started")
    run, config = open_run(process.bucket, wait_s=RUN_PATIENCE_S, stopping=process.is_stopping)
    process.heart.faults = config.faults
    with process.heart.taking("start"):
        worker = Worker(process, run, config, say=say)
    process.events.span("start", started)
    say(f"joined run {config.name} as {process.name} at version {worker.served.live.version}")
    asyncio.run(worker.serve(patience_s=patience_s))
    worker.say_how_it_stands()
    process.tell("stopped", f"version {worker.served.live.version}")
