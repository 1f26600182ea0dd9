"""Evaluator: a process that follows the run and measures held-out accuracy of some versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from statistics import fmean

from deltawire.config import RunConfig
from deltawire.envs import TaskSource, open_tasks
from deltawire.envs.mixture import MixtureTasks
from deltawire.errors import InputError
from deltawire.estimates import OffPolicyEstimate
from deltawire.events import MOST_RESULTS, Controlled, Evaluated, HeldoutScore
from deltawire.rl.budget.decision import BudgetHistory
from deltawire.rl.evaluate.budget_curve import area_of, measure_budgets
from deltawire.rl.evaluate.serving_scores import ServingScores, results_kept
from deltawire.rl.evaluate.setting_scores import measure_settings, published_bytes, shares_correct
from deltawire.rl.rollout.episode import play_tasks
from deltawire.rl.rollout.episode_types import Episode, EpisodeLimits
from deltawire.rl.rollout.policy_server import ServedPolicy, follow, serve_policy, swap
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.process import Process, StopAskedError
from deltawire.sync.chain.first_version import first_version
from deltawire.sync.chain.objects import newest_retention_floor
from deltawire.wire.run import Run

Estimator = Callable[[ServedPolicy, Callable[[str], None]], OffPolicyEstimate | None]
"""Estimates a version's live metric; the second argument reports progress."""
OpenEstimator = Callable[[Process, RunConfig], Estimator]


def no_estimator(process: Process, config: RunConfig) -> Estimator:
    """Opens an estimator that estimates nothing."""
    del process, config
    return lambda _served, _progress: None


async def measure(
    served: ServedPolicy,
    config: RunConfig,
    progress: Callable[[str], None] = lambda _: None,
    *,
    tasks: TaskSource | None = None,
    most_results: int = MOST_RESULTS,
) -> HeldoutScore:
    """Solves every held-out problem of ``tasks`` (the run's), ``samples`` times at the rollout's
    temperature and once greedy.

    ``progress`` is called after every engine step. Episodes that fail count neither as correct nor
    as wrong; raises `InputError` if all of them fail. The results of the first ``most_results``
    problems are kept one by one.
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
        if all(episode.cause for episode in episodes):
            raise InputError(f"every held-out episode failed: {episodes[0].cause}")
        return episodes

    played = await solve(rollout.temperature, samples)
    sampled = [episode for episode in played if not episode.cause]
    greedy = [episode for episode in await solve(0.0, 1) if not episode.cause]
    return HeldoutScore(
        accuracy=fmean(episode.solved for episode in sampled),
        greedy=fmean(episode.solved for episode in greedy),
        reward=fmean(episode.trajectory.reward for episode in sampled),
        samples=samples,
        problems=len(problems),
        correct=shares_correct(played, samples)[:most_results],
    )


async def measure_all(
    served: ServedPolicy,
    config: RunConfig,
    sets: Mapping[str, TaskSource],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[HeldoutScore, dict[str, HeldoutScore]]:
    """Measures the run's own held-out problems, and each named set."""
    most = results_kept(len(sets))
    whole = await measure(served, config, progress, most_results=most)
    return whole, {
        name: await measure(served, config, progress, tasks=tasks, most_results=most)
        for name, tasks in sets.items()
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


class _Controller:
    """Decides after each evaluation what compute is spent on; records decisions, each once."""

    def __init__(self, process: Process, run: Run, config: RunConfig) -> None:
        self._process, self._run = process, run
        self._history = BudgetHistory(config) if config.budget.controller == "auto" else None
        self._before = -1
        if self._history is None:
            return
        events = events_of(process.bucket, process.name)
        recorded = {one.version for one in events if isinstance(one, Controlled)}
        measured = [one for one in events if isinstance(one, Evaluated)]
        for one in sorted(measured, key=lambda one: (one.version, one.at)):
            self._before = max(self._before, one.version)
            found = self._history.observe(one)
            if found is not None and found.version not in recorded:
                process.events.record(found)

    def published(self, version: int) -> float:
        """The mean bytes of the versions since the evaluation before."""
        if self._history is None:
            return 0.0
        first = max(1, self._before + 1)
        return published_bytes(self._process.bucket, self._run, first, version)

    def observe(self, event: Evaluated) -> None:
        """Decides by a new evaluation."""
        if self._history is None:
            return
        self._before = event.version
        found = self._history.observe(event)
        if found is not None:
            self._process.events.record(found)


def run_evaluator(process: Process, estimator: OpenEstimator = no_estimator) -> None:
    """Runs an evaluator process, which follows every version and measures those that are due and
    the last; of a run of several adapters, those of each line. The ``estimator`` estimates their
    live metric."""
    started = time.time()
    process.record_life("started")
    with suppress(StopAskedError), ExitStack() as stack:
        with process.interruptible(), process.heartbeat.long_task("start"):
            run, config = process.open_run()
            if config.train.adapters:
                names = [one.name for one in config.train.adapters]
                waiting = {name: _open_line(process, name, stack) for name in names}
            else:
                beat = partial(_beat, process)
                estimate = estimator(process, config)
                follower = _HeldoutFollower(
                    process, run, config, stack, beat=beat, estimate=estimate
                )
                waiting = {"": follower}
        process.events.span("start", started)
        _follow_all(process, waiting)
    process.record_life("stopped")


def _beat(process: Process, activity: str) -> None:
    """Reports progress; raises `StopAskedError` once the process was asked to stop.

    A measurement may take minutes, and nothing of it is kept if it is not finished.
    """
    process.heartbeat.progress(activity)
    if process.stopping:
        raise StopAskedError


def _follow_all(process: Process, waiting: dict[str, _HeldoutFollower]) -> None:
    """Measures the versions of each line as they arrive, up to the last."""
    while waiting and not process.stopping:
        process.heartbeat.progress("wait")
        began = process.events.now()
        moved = False
        for name, one in list(waiting.items()):
            one.measure()
            if one.is_last:
                del waiting[name]
            else:
                began = process.events.now()
                moved |= one.swap()
        if waiting and not moved:
            process.wait(process.bucket.poll_s)
            process.events.span("wait", began)


def _open_line(process: Process, name: str, stack: ExitStack) -> _HeldoutFollower:
    """Opens a version line of the run, over the base that all of them share in this process."""
    place = line_bucket(process.bucket, name, create=True)
    own = process.in_line(place)
    stack.enter_context(own.registered())
    run, config = own.open_run()
    own.record_life("started")
    stack.callback(own.record_life, "stopped")

    def beat(activity: str) -> None:
        own.heartbeat.progress(activity)
        _beat(process, activity)

    return _HeldoutFollower(own, run, config, stack, beat=beat)


class _HeldoutFollower:
    """Follows the versions of a run or line, and measures those that are due and the last.

    ``stack`` ends what it starts; ``beat`` reports progress.
    """

    def __init__(
        self,
        process: Process,
        run: Run,
        config: RunConfig,
        stack: ExitStack,
        *,
        beat: Callable[[str], None],
        estimate: Estimator = lambda _served, _progress: None,
    ) -> None:
        self._process, self._config, self._beat = process, config, beat
        self._estimate = estimate
        self._done = evaluated_versions(process)
        self._controller = _Controller(process, run, config)
        self._served, steps = serve_policy(
            process,
            run,
            config,
            engine="transformers",
            seed=config.seed,
            slots=config.evaluate.slots,
            # Of a fork, and after retention, version 0 is not there.
            at=self._begin(run),
            weights=config.rollout.weights,
            stepwise=True,  # Every due version is measured, even if several arrive at once.
        )
        self._sets = named_sets(self._served, config)
        self._follower = follow(steps, self._served)
        self._follower.start()
        stack.callback(self._follower.close)
        self._serving = ServingScores(process, run, config, self._sets, beat=beat)
        stack.callback(self._serving.close)
        self.is_last = False
        """True once the run's last version is measured."""

    def _begin(self, run: Run) -> int:
        """Returns the version to serve at first. Of a fork, and after retention, version 0 is not
        there."""
        bucket = self._process.bucket
        if not self._done:
            return first_version(bucket, run)
        return max(newest_retention_floor(bucket, run), *self._done)

    def measure(self) -> None:
        """Measures the live version if it is due and was not measured."""
        process, served, config = self._process, self._served, self._config
        self._beat("wait")
        version = served.live.version
        last = _is_last(process, version)
        every = config.evaluate.every
        due = last or (every > 0 and version % every == 0)
        if due and version not in self._done:
            began = process.events.now()
            whole, named = asyncio.run(measure_all(served, config, self._sets, self._beat))
            curve = asyncio.run(measure_budgets(served, config, self._beat))
            settings = asyncio.run(measure_settings(served, config, self._beat))
            estimate = self._estimate(served, self._beat)
            ended = process.events.span("evaluate", began)
            event = Evaluated(
                process=process.name,
                at=ended,
                version=version,
                accuracy=whole.accuracy,
                greedy=whole.greedy,
                samples=whole.samples,
                problems=whole.problems,
                seconds=ended - began,
                reward=whole.reward,
                correct=whole.correct,
                sets=named,
                budgets=curve,
                area=area_of(curve),
                off_policy=estimate,
                settings=settings,
                published=self._controller.published(version),
            )
            process.events.record(event)
            self._controller.observe(event)
            process.events.flush()
            process.heartbeat.count_finished()
            self._done.add(version)
            self._serving.measure(candidate=version)
        else:
            self._serving.measure()
        self.is_last = last

    def swap(self) -> bool:
        """Moves to the next version if it is there; returns whether it moved."""
        version = self._served.live.version
        swap(self._served, self._follower, self._process)
        return self._served.live.version != version


def _is_last(process: Process, version: int) -> bool:
    status = known_trainer(process.bucket)
    return status is not None and status.phase == "finished" and status.version == version
