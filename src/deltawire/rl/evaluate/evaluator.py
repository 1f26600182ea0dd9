"""Evaluator: a process that follows the run and measures held-out accuracy of some versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from statistics import fmean

from deltawire.config import RunConfig
from deltawire.envs import TaskSource, open_tasks
from deltawire.envs.mixture import MixtureTasks
from deltawire.errors import InputError
from deltawire.events import Evaluated, HeldoutScore
from deltawire.rl.evaluate.budget_curve import area_of, measure_budgets
from deltawire.rl.rollout.episode import play_tasks
from deltawire.rl.rollout.episode_types import Episode, EpisodeLimits
from deltawire.rl.rollout.policy_server import ServedPolicy, follow, serve_policy, swap
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.process import RUN_PATIENCE_S, Process, open_run
from deltawire.sync import Follower


async def measure(
    served: ServedPolicy,
    config: RunConfig,
    progress: Callable[[str], None] = lambda _: None,
    *,
    tasks: TaskSource | None = None,
) -> HeldoutScore:
    """Solves every held-out problem of ``tasks`` (the run's), ``samples`` times at the rollout's
    temperature and once greedy.

    ``progress`` is called after every engine step. Episodes that fail count neither as correct nor
    as wrong; raises `InputError` if all of them fail.
    """
    rollout, samples = config.rollout, config.evaluate.samples
    limits = EpisodeLimits.of(rollout)
    source = served.tasks if tasks is None else tasks
    problems = source.heldout()

    async def solve(temperature: float, times: int) -> list[Episode]:
        episodes = await play_tasks(
            served.engine,
            source,
            served.text,
            [task for task in problems for _ in range(times)],
            temperature=temperature,
            limits=limits,
            concurrent=rollout.concurrent or served.engine.slots,
            after_step=lambda: progress("evaluate"),
        )
        completed = [episode for episode in episodes if not episode.cause]
        if not completed:
            raise InputError(f"every held-out episode failed: {episodes[0].cause}")
        return completed

    sampled = await solve(rollout.temperature, samples)
    greedy = await solve(0.0, 1)
    return HeldoutScore(
        accuracy=fmean(episode.solved for episode in sampled),
        greedy=fmean(episode.solved for episode in greedy),
        reward=fmean(episode.trajectory.reward for episode in sampled),
        samples=samples,
        problems=len(problems),
    )


async def measure_all(
    served: ServedPolicy,
    config: RunConfig,
    sets: Mapping[str, TaskSource],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[HeldoutScore, dict[str, HeldoutScore]]:
    """Measures the run's own held-out problems, and each named set."""
    whole = await measure(served, config, progress)
    return whole, {
        name: await measure(served, config, progress, tasks=tasks) for name, tasks in sets.items()
    }


def named_sets(served: ServedPolicy, config: RunConfig) -> dict[str, TaskSource]:
    """The sets to evaluate by name: the parts of a mixture, then those of ``evaluate.sets``."""
    parts = served.tasks.parts if isinstance(served.tasks, MixtureTasks) else {}
    sets = {one.name: open_tasks(one.task, seed=config.seed) for one in config.evaluate.sets}
    return {**parts, **sets}


def evaluated_versions(process: Process) -> set[int]:
    """Versions that an evaluator of this run measured before."""
    events = events_of(process.bucket, process.name)
    return {event.version for event in events if isinstance(event, Evaluated)}


def run_evaluator(process: Process) -> None:
    """Runs an evaluator process, which follows every version and measures those that are due and
    the last."""
    started = time.time()
    process.record_life("started")
    run, config = open_run(process.bucket, wait_s=RUN_PATIENCE_S, stopping=process.is_stopping)
    process.heartbeat.faults = config.faults
    with process.heartbeat.long_task("start"):
        done = evaluated_versions(process)
        served, steps = serve_policy(
            process,
            run,
            config,
            engine="transformers",
            seed=config.seed,
            slots=config.evaluate.slots,
            at=max(done, default=0),
            stepwise=True,  # Every due version is measured, even if several arrive at once.
        )
    follower = follow(steps, served)
    follower.start()
    process.events.span("start", started)
    try:
        _follow(process, config, served, follower, done)
    finally:
        follower.close()
    process.record_life("stopped")


def _follow(
    process: Process, config: RunConfig, served: ServedPolicy, follower: Follower, done: set[int]
) -> None:
    sets = named_sets(served, config)
    while not process.stopping:
        process.heartbeat.progress("wait")
        version = served.live.version
        last = _is_last(process, version)
        every = config.evaluate.every
        due = last or (every > 0 and version % every == 0)
        if due and version not in done:
            began = process.events.now()
            beat = process.heartbeat.progress
            whole, named = asyncio.run(measure_all(served, config, sets, beat))
            curve = asyncio.run(measure_budgets(served, config, beat))
            ended = process.events.span("evaluate", began)
            process.events.record(
                Evaluated(
                    process=process.name,
                    at=ended,
                    version=version,
                    accuracy=whole.accuracy,
                    greedy=whole.greedy,
                    samples=whole.samples,
                    problems=whole.problems,
                    seconds=ended - began,
                    reward=whole.reward,
                    sets=named,
                    budgets=curve,
                    area=area_of(curve),
                )
            )
            process.events.flush()
            process.heartbeat.count_finished()
            done.add(version)
        if last:
            return
        began = process.events.now()
        swap(served, follower, process)
        if served.live.version == version:
            process.wait(process.bucket.poll_s)
            process.events.span("wait", began)


def _is_last(process: Process, version: int) -> bool:
    status = known_trainer(process.bucket)
    return status is not None and status.phase == "finished" and status.version == version
