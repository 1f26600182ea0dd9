"""Setting scores: the same held-out problems with every thinking budget and scaffold.

The controller (`deltawire.rl.budget.decision`) compares them problem by problem. The price is
recorded with them: tokens of an answer, seconds of its environment, and bytes of the versions that
were published since the evaluation before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from deltawire.config import RunConfig
from deltawire.envs import Task, TaskSource
from deltawire.envs.base import Action, AgentHarness, Turn
from deltawire.errors import CorruptError, InputError
from deltawire.estimates import BudgetSetting, SettingScore
from deltawire.rl.budget.limits import BudgetLimits, Place
from deltawire.rl.rollout.episode import play_tasks
from deltawire.rl.rollout.episode_types import Episode, EpisodeLimits, with_setting
from deltawire.rl.rollout.policy_server import ServedPolicy
from deltawire.store import Bucket
from deltawire.sync import read_manifest
from deltawire.wire.run import Run

MOST_VERSIONS = 64
"""Versions whose bytes are read, at most: the newest ones."""


class _TimedEnvironment:
    """Passes everything on to an environment, and adds up the time of its calls."""

    def __init__(self, environment: Any, add: Callable[[float], None]) -> None:
        self._environment, self._add = environment, add

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(self) -> Turn:
        """See `Environment.reset`."""
        began = time.perf_counter()
        try:
            turn: Turn = await self._environment.reset()
        finally:
            self._add(time.perf_counter() - began)
        return turn

    async def step(self, action: Action) -> Turn:
        """See `Environment.step`."""
        began = time.perf_counter()
        try:
            turn: Turn = await self._environment.step(action)
        finally:
            self._add(time.perf_counter() - began)
        return turn


class _TimedTasks:
    """A source whose environments are timed; a harness is not, as it leads its own turns."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def open(self, task: Task) -> Any:
        """See `TaskSource.open`."""
        environment = self._source.open(task)
        if isinstance(environment, AgentHarness):
            return environment
        return _TimedEnvironment(environment, self._add)

    def _add(self, seconds: float) -> None:
        self.seconds += seconds


async def measure_settings(
    served: ServedPolicy,
    config: RunConfig,
    progress: Callable[[str], None] = lambda _: None,
) -> list[SettingScore]:
    """Answers the first ``budget.problems`` held-out problems ``evaluate.samples`` times with every
    thinking budget and scaffold that the controller moves between; nothing without one.

    Raises `InputError` for fewer than two held-out problems, and if every episode of a setting
    fails.
    """
    if config.budget.controller == "fixed":
        return []
    problems = served.tasks.heldout()[: config.budget.problems]
    if len(problems) < 2:
        raise InputError(
            f'budget.controller = "auto" needs a held-out set, and it has {len(problems)} problems',
            hint='hold out two or more, or set budget.controller = "fixed"',
        )
    places = BudgetLimits.of(config).places
    return [await _score(served, config, problems, place, progress) for place in places]


async def _score(
    served: ServedPolicy,
    config: RunConfig,
    problems: list[Task],
    place: Place,
    progress: Callable[[str], None],
) -> SettingScore:
    budget, scaffold = place
    samples = config.evaluate.samples
    limits = EpisodeLimits.of(with_setting(config.rollout, BudgetSetting(scaffold=scaffold)))
    if config.rollout.thinking is not None:
        most = budget + config.rollout.thinking.answer_tokens
        limits = replace(limits, budget=budget, max_tokens=most)
    tasks: Any = _TimedTasks(served.tasks)
    episodes = await play_tasks(
        served.engine,
        tasks,
        served.text,
        [task for task in problems for _ in range(samples)],
        temperature=config.rollout.temperature,
        limits=limits,
        concurrent=config.rollout.concurrent or served.engine.slots,
        after_step=lambda: progress("evaluate"),
    )
    completed = [episode for episode in episodes if not episode.cause]
    if not completed:
        raise InputError(
            f"every held-out episode with scaffold {scaffold} failed: {episodes[0].cause}"
        )
    drawn = sum(int(t.mask_T.sum()) for episode in completed for t in episode.trajectories)
    return SettingScore(
        thinking=budget,
        scaffold=scaffold,
        correct=shares_correct(episodes, samples),
        tokens=drawn / len(completed),
        seconds=tasks.seconds / len(episodes),
    )


def shares_correct(episodes: Sequence[Episode], samples: int) -> list[float]:
    """Returns the share of correct answers to each problem, of ``samples`` episodes one after
    another; -1 for a problem whose episodes all failed."""
    found = []
    for begin in range(0, len(episodes), samples):
        answers = episodes[begin : begin + samples]
        solved = [episode.solved for episode in answers if not episode.cause]
        found.append(round(fmean(solved), 4) if solved else -1.0)
    return found


def published_bytes(bucket: Bucket, run: Run, first: int, last: int) -> float:
    """The mean bytes of the deltas of versions ``first`` to ``last``, of the newest
    `MOST_VERSIONS`; 0 if there are none."""
    found = []
    for version in range(max(first, last - MOST_VERSIONS + 1), last + 1):
        try:
            manifest = read_manifest(bucket, run, version)
        except CorruptError:
            continue
        if manifest is not None and manifest.delta is not None:
            found.append(manifest.delta.bytes)
    return fmean(found) if found else 0.0
