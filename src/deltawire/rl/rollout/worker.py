"""Rollout worker: follows the weights, samples groups while it has credits, and stores them.

Concurrency::

    follower's thread      prepares the next version        ┐
    trainer link's thread  reads trainer.json               ├─▶ serving loop: swap, start groups,
    uploader's thread   ◀─ finished groups, one put each    ┘   decode one step
    heartbeat's thread     reads phase, version, lag

The serving loop never waits for the bucket. A vLLM engine fetches its own weights: the follower
then supplies only versions and digests, and a thread waits for the swap. A worker that dies loses
the groups that it had not finished; what it stored is found in the bucket when it returns under
the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from deltawire.codec import Digest
from deltawire.config import RolloutConfig, RunConfig
from deltawire.engines.transformers import IDLE_S
from deltawire.errors import RetryError
from deltawire.estimates import BudgetSetting
from deltawire.rl.budget.limits import BudgetLimits
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of, with_budget, with_setting
from deltawire.rl.rollout.failure_budget import FailureBudget
from deltawire.rl.rollout.group_numbers import GroupDraw, allowed_lag, draw_of, next_sequence
from deltawire.rl.rollout.hardening import protect_credentials
from deltawire.rl.rollout.policy_server import (
    follow,
    serve_policy,
    swap,
)
from deltawire.rl.rollout.reuse import play_group
from deltawire.rl.rollout.trainer_link import TrainerLink
from deltawire.rl.rollout.uploader import Uploader
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.process import Process, StopAskedError
from deltawire.wire.run import Run
from deltawire.wire.status import MAX_ALARM, TrainerStatus, WorkerPhase, WorkerStatus

REPORT_EVERY_S = 10.0
WAIT_S = 0.01
"""The pause of an idle loop, which sees new versions and credits that threads have fetched."""


class Worker:
    """One worker's serving loop."""

    def __init__(
        self, process: Process, run: Run, config: RunConfig, *, report: Callable[[str], None]
    ) -> None:
        self.process = process
        self._report = report
        self._reported_at = time.monotonic()
        self.config = config
        bucket = process.bucket
        first = next_sequence(process)
        seed = int.from_bytes(process.nonce.encode()[:6], "little") ^ config.seed
        self.served, steps = serve_policy(
            process,
            run,
            config,
            engine=config.rollout.engine,
            seed=seed,
            record_routes=config.parity.routes != "off",
            weights=config.rollout.weights,
        )
        self.phase: WorkerPhase = "sampling"
        self.attested: Digest | None = None
        self.follower = follow(steps, self.served)
        self.link = TrainerLink(bucket, process.name, silence_s=config.faults.silence_s)
        self.uploader = Uploader(bucket, process.name, first, process)
        self._first = first
        self._started = first
        self._drawn = 0
        self._episodes = self._tokens = 0
        """Ended and drawn since this process started."""
        self._groups: dict[asyncio.Task[None], int] = {}
        """The groups under way, each with its number of completions."""
        self._failure: BaseException | None = None
        self._failures = FailureBudget(config.rollout, process.name)
        self._limits = BudgetLimits.of(config)
        self._allowed_lag = allowed_lag(config.train.max_staleness)
        process.heartbeat.worker = self._status

    def _status(self) -> WorkerStatus:
        live, trainer = self.served.live, self.link.status
        return WorkerStatus(
            phase=self.phase,
            version=live.version,
            digest=(self.attested or live.digest).hex(),
            attested=self.attested is not None,
            lag=max(0, (trainer.version if trainer else 0) - live.version),
            stored=self.uploader.stored,
            first=self._first,
            alarm=self._alarm()[:MAX_ALARM],
            episodes=self._episodes,
            tokens=self._tokens,
        )

    def _alarm(self) -> str:
        """Why a newer manifest or the trainer's status could not be read; empty if all could."""
        alarm = self.follower.alarm or self.link.alarm
        return "" if alarm is None else str(alarm)

    async def serve(self, *, patience_s: float) -> None:
        """Samples until the run is finished, until asked to stop, or until the trainer has been
        stopped for ``patience_s``."""
        for thread in (self.follower, self.link, self.uploader):
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
            self.link.close()
            self.phase = "finished" if self.phase == "finished" else "stopped"

    async def _serve(self, patience_s: float) -> None:
        training_at = time.monotonic()
        while not self.process.stopping:
            self.process.heartbeat.progress("sample" if self._groups else "wait")
            self.link.raise_error()
            self.uploader.raise_error()
            if self._failure is not None:
                raise self._failure
            if self.served.external:
                await asyncio.to_thread(swap, self.served, self.follower, self.process)
            else:
                swap(self.served, self.follower, self.process)
            status = self.link.status
            if status is not None and status.phase == "finished":
                if self._finish(status):
                    return
            elif status is not None and status.phase == "training":
                training_at = self.link.alive_at
                self._start_groups(status)
            if time.monotonic() - training_at > patience_s:
                raise RetryError(
                    f"the trainer has not been training for {patience_s:.0f} s",
                    hint="continue the run with deltawire run, then start this worker again",
                    run=self.process.bucket.url,
                )
            await self._advance()
            if time.monotonic() - self._reported_at > REPORT_EVERY_S:
                self.report_progress()
        self.phase = "stopped"

    def report_progress(self) -> None:
        """Reports one line for a person."""
        self._reported_at = time.monotonic()
        status, live = self.link.status, self.served.live
        lag = max(0, (status.version if status else 0) - live.version)
        doing = self.phase if status is None or status.phase == "training" else status.phase
        stored = self.uploader.stored - self._first
        failed = f", {self._failures.count} episodes failed" if self._failures.count else ""
        alarm = self._alarm()
        warning = f"; warning: passed over an object: {alarm}" if alarm else ""
        self._report(
            f"version {live.version}, lag {lag}, {stored} groups stored{failed}, {doing}{warning}"
        )

    async def _advance(self) -> None:
        """Runs one engine step, or sleeps briefly if there is nothing to do."""
        events, engine = self.process.events, self.served.engine
        began = events.now()
        if engine.active:
            self._tokens += await engine.advance()
            events.span("sample", began)
        else:
            # Environments that run elsewhere will need the engine at any moment.
            await asyncio.sleep(IDLE_S if self._groups else WAIT_S)
            events.span("wait", began)

    def _start_groups(self, status: TrainerStatus) -> None:
        rollout = self.config.rollout
        granted = status.credits.get(self.process.name, 0)
        concurrent = rollout.concurrent or self.served.engine.slots
        free = concurrent - sum(self._groups.values())
        while (
            self._started < granted
            and self.link.secret is not None
            and status.version - self.served.live.version <= self._allowed_lag
            and (draw := self._draw_of(status, self.link.secret)) is not None
            and (free >= (size := draw.size or rollout.group_size) or not self._groups)
        ):
            free -= size
            self._started += 1
            at = draw.stream, draw.position, size
            group = self._sample_group(self._drawn, self.link.secret, at, status.budget)
            task = asyncio.get_running_loop().create_task(group)
            self._drawn += 1
            self._groups[task] = size
            task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._groups.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error

    def _draw_of(self, status: TrainerStatus, secret: str) -> GroupDraw | None:
        process, size = self.process, self.config.rollout.allocation.first(0)
        lease = process.lease.number
        return draw_of(
            status, process.name, lease, self._drawn, secret, nonce=process.nonce, size=size
        )

    async def _sample_group(
        self, number: int, secret: str, at: tuple[str, int, int], setting: BudgetSetting | None
    ) -> None:
        stream, place, size = at
        rollout, told = self._rollout(setting)
        limits = EpisodeLimits.of(rollout)
        name, nonce, lease = self.process.name, self.process.nonce, self.process.lease.number
        nonce = nonce_of(secret, lease, number) if secret else nonce
        task = self.served.tasks.draw(stream, place)
        version, group = self.served.live.version, f"{nonce}/{task.identity}"
        episodes = await play_group(
            self.served.engine,
            lambda: self.served.tasks.open(task),
            self.served.text,
            rollout,
            [
                with_budget(limits, version=version, group=group, episode=n, told=told)
                for n in range(size)
            ],
            ended=self._count_episode,
        )
        self._failures.add(task, episodes)
        self.uploader.submit(group_of(name, nonce, task, rollout.temperature, episodes))

    def _count_episode(self) -> None:
        self._episodes += 1

    def _rollout(self, setting: BudgetSetting | None) -> tuple[RolloutConfig, int]:
        """The rollouts of the controller's setting and its thinking budget; the configured ones and
        0 without a controller, and for a setting outside the run's limits."""
        config = self.config
        if setting is None or config.budget.controller == "fixed":
            return config.rollout, 0
        if not self._limits.allows(setting):
            return config.rollout, 0
        return with_setting(config.rollout, setting), setting.thinking

    def _finish(self, status: TrainerStatus) -> bool:
        """At the last version, recompute the digest from the serving weights; else continue."""
        if self.served.live.version < status.version:
            return False
        self.attested = self.served.live.attest()
        self.phase = "finished"
        return True


def run_worker(process: Process, *, patience_s: float, report: Callable[[str], None]) -> None:
    """Runs a worker process from its start to the run's end or a signal.

    ``report`` takes a line for a person: on joining, every few seconds, and at the end.
    """
    process.record_life("started")
    try:
        _run_worker(process, patience_s=patience_s, report=report)
    except StopAskedError:
        process.record_life("stopped", "before it had joined the run")


def _run_worker(process: Process, *, patience_s: float, report: Callable[[str], None]) -> None:
    started = time.time()
    with process.interruptible():
        run, config = process.open_run()
    if config.train.adapters:
        serve_lines(process, config, patience_s=patience_s, report=report)
        return
    with process.interruptible(), process.heartbeat.long_task("start"):
        worker = Worker(process, run, config, report=report)
    protect_credentials()
    process.events.span("start", started)
    report(f"joined run {config.name} as {process.name} at version {worker.served.live.version}")
    asyncio.run(worker.serve(patience_s=patience_s))
    worker.report_progress()
    process.record_life("stopped", f"version {worker.served.live.version}")


def serve_lines(
    process: Process, config: RunConfig, *, patience_s: float, report: Callable[[str], None]
) -> None:
    """Sample for each line of a run of several adapters, in turn, over one base.

    Each line has a `Worker` with its own bucket, tasks and engine; all decode in this thread. Ends
    when every line has its last version.
    """
    with contextlib.ExitStack() as stack:
        workers = {}
        for one in config.train.adapters:
            place = line_bucket(process.bucket, one.name, create=True)
            own = process.in_line(place)
            stack.enter_context(own.registered())
            with process.interruptible(), process.heartbeat.long_task("start"):
                run, line = own.open_run()
                own.record_life("started")
                workers[one.name] = Worker(
                    own, run, line, report=partial(_report, report, one.name)
                )
        protect_credentials()
        report(f"joined run {config.name} as {process.name}, lines {', '.join(workers)}")
        asyncio.run(_serve_all(process, list(workers.values()), patience_s))
        for name, worker in workers.items():
            worker.report_progress()
            worker.process.record_life("stopped", f"version {worker.served.live.version}")
            process.record_life("stopped", f"{name} version {worker.served.live.version}")


def _report(report: Callable[[str], None], line: str, text: str) -> None:
    """Report one line for a person, with the name of the version line."""
    report(f"{line}: {text}")


async def _serve_all(process: Process, workers: Sequence[Worker], patience_s: float) -> None:
    """Serves all; an error of one ends the others."""
    tasks = [asyncio.create_task(one.serve(patience_s=patience_s)) for one in workers]
    try:
        while waiting := [task for task in tasks if not task.done()]:
            process.heartbeat.progress("sample")
            done, _ = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
