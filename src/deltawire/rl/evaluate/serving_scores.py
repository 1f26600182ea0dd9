"""Serving scores: the version that serves, measured again on the problems of the release gate.

::

    an evaluation of a candidate ─┐
    another version serves ───────┴─▶ a second model at the serving version ─▶ `ServingMeasured`

What let a version pass was partly luck, so its own results are too good a measure for the
candidates after it, and one result for all of them would make its luck theirs. So the version that
serves answers the problems again with each candidate, and once when it begins to serve, since the
next candidate may have been measured before.

The evaluator follows the newest version and cannot go back, so this is a second model in its
process. It is opened where decisions exist only, and again once another version serves.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from deltawire.config import RunConfig
from deltawire.envs import TaskSource
from deltawire.errors import (
    CorruptError,
    InputError,
    ResyncError,
    RetryError,
    SignatureError,
)
from deltawire.events import MOST_RESULTS, ServingMeasured
from deltawire.rl.evaluate.setting_scores import shares_correct
from deltawire.rl.rollout.episode import play_tasks
from deltawire.rl.rollout.episode_types import EpisodeLimits
from deltawire.rl.rollout.policy_server import ServedPolicy, serve_policy
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.process import Process
from deltawire.wire.run import Run

POLL_EVERY_S = 2.0


class ServingScores:
    """Measures the version that serves, and records it.

    ``sets`` are the named sets of the evaluation; those of the gate are answered, ``samples`` times
    each at the rollout's temperature.

    Example::

        scores = ServingScores(process, run, config, sets, beat=beat)
        scores.measure(with_candidate=True)     # after each evaluation
        scores.measure()                        # while the evaluator waits
    """

    def __init__(
        self,
        process: Process,
        run: Run,
        config: RunConfig,
        sets: Mapping[str, TaskSource],
        *,
        beat: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._process, self._run, self._config, self._beat = process, run, config, beat
        gate = config.live.release.gate if config.live.release.measure_again else {}
        self._whole = "accuracy" in gate
        self._sets = {name: tasks for name, tasks in sets.items() if name in gate}
        self._log = DecisionLog(process.bucket, run.id)
        self._served: ServedPolicy | None = None
        self._opened = 0
        self._measured = -1
        """The version that was measured last."""
        self._due = False
        """True if a candidate was measured since."""
        self._asked_at = -math.inf

    def measure(self, *, with_candidate: bool = False) -> None:
        """Measures the version that serves if a candidate was measured just now, or if it was not
        measured yet. Without decisions it does nothing, and asks for them once a candidate only."""
        self._due |= with_candidate
        if not (self._whole or self._sets) or not (self._due or self._log.newest):
            return
        if not self._due and time.monotonic() - self._asked_at < POLL_EVERY_S:
            return
        self._asked_at = time.monotonic()
        # Neither an outage nor a series that someone cut off ends the evaluation of versions.
        with suppress(RetryError, SignatureError):
            self._log.poll()
            self._measure()

    def _measure(self) -> None:
        decision, due = self._log.newest, self._due
        if decision is None:
            self._due = False
            return
        version = decision.serving.version
        if version == self._measured and not due:
            return
        try:
            served = self._at(version)
        except (CorruptError, InputError, ResyncError):  # It was pruned: the gate goes on without.
            self._measured, self._due = version, False
            return
        began = self._process.events.now()
        found = asyncio.run(self._answered(served))
        ended = self._process.events.span("evaluate", began)
        whole = found.pop("accuracy", [])
        self._process.events.record(
            ServingMeasured(
                process=self._process.name,
                at=ended,
                version=version,
                seconds=ended - began,
                correct=whole,
                sets=found,
            )
        )
        self._process.events.flush()
        self._measured, self._due = version, False

    def close(self) -> None:
        """Closes the second model."""
        if self._served is not None:
            asyncio.run(_close(self._served))
            self._served = None

    def _at(self, version: int) -> ServedPolicy:
        if self._served is not None and self._served.live.version == version:
            return self._served
        self.close()
        self._opened += 1
        with self._process.heartbeat.long_task("start"):
            self._served, _ = serve_policy(
                self._process,
                self._run,
                self._config,
                engine="transformers",
                # Other draws than those of the candidate, and of earlier models.
                seed=self._config.seed + 1_000_003 * self._opened + version,
                slots=self._config.evaluate.slots,
                at=version,
                weights=self._config.rollout.weights,
                stepwise=True,
            )
        return self._served

    async def _answered(self, served: ServedPolicy) -> dict[str, list[float]]:
        """Return the share correct of each problem of each set."""
        rollout, samples = self._config.rollout, self._config.evaluate.samples
        sources = {"accuracy": served.tasks} if self._whole else {}
        sources |= self._sets
        most, found = MOST_RESULTS // len(sources), {}
        for name, source in sources.items():
            problems = source.heldout()[:most]
            episodes = await play_tasks(
                served.engine,
                source,
                served.text,
                [task for task in problems for _ in range(samples)],
                temperature=rollout.temperature,
                limits=EpisodeLimits.of(rollout),
                concurrent=rollout.concurrent or served.engine.slots,
                after_step=lambda: self._beat("evaluate"),
            )
            found[name] = shares_correct(episodes, samples)
        return found


async def _close(served: ServedPolicy) -> None:
    await served.close()
