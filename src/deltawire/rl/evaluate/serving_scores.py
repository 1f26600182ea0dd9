"""Serving scores: the version that serves, measured again on the problems of the release gate.

::

    an evaluation of a candidate ─┐
    another version serves ───────┴─▶ a second model at the serving version ─▶ `ServingMeasured`

What let a version pass was partly luck, so its own results are too good a measure for the
candidates after it, and one result for all of them would make its luck theirs. So the version that
serves answers the problems once for each candidate: after the candidate's evaluation, and for a
candidate at the gate that was evaluated while another version served.

The evaluator follows the newest version and cannot go back, so this is a second model in its
process. It is opened where decisions exist only, and again once another version serves. One that
cannot be opened, or ended the process twice, is left out until another version serves.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
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
from deltawire.events import MOST_RESULTS, Life, ServingMeasured, ServingOpened
from deltawire.rl.evaluate.setting_scores import shares_correct
from deltawire.rl.rollout.episode import play_tasks
from deltawire.rl.rollout.episode_types import EpisodeLimits
from deltawire.rl.rollout.policy_server import ServedPolicy, serve_policy
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process
from deltawire.wire.run import Run

POLL_EVERY_S = 2.0
MOST_REASON = 256
MOST_OPENINGS = 2
"""A second model whose process ended so often before it had a result is not opened again."""


def results_kept(sets: int) -> int:
    """Returns how many results of each set are kept where there are ``sets`` named ones: as many of
    the version that serves as of a candidate, or they could not be compared."""
    return MOST_RESULTS // (1 + sets)


class ServingScores:
    """Measures the version that serves, and records it.

    ``sets`` are the named sets of the evaluation; those of the gate are answered, ``samples`` times
    each at the rollout's temperature.

    Example::

        scores = ServingScores(process, run, config, sets, beat=beat)
        scores.measure(candidate=4)             # after each evaluation
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
        self._most = results_kept(len(sets))
        self._log = DecisionLog(process.bucket, run.id)
        self._served: ServedPolicy | None = None
        self._opened = 0
        self._measured: set[tuple[int, int]] = set()
        """Versions that served, each with the candidate that it was measured for."""
        self._failed: set[int] = set()
        """Versions that cannot be measured."""
        self._due: int | None = None
        """A candidate that was evaluated, and whose measurement is still to come."""
        self._asked_at = -math.inf
        if self._whole or self._sets:
            self._read_earlier()

    def _read_earlier(self) -> None:
        """Read what earlier lives of this process measured, and what ended them."""
        events = [
            event
            for event in events_of(self._process.bucket, self._process.name)
            if isinstance(event, Life | ServingOpened | ServingMeasured)
        ]
        openings: Counter[int] = Counter()
        for event in sorted(events, key=lambda event: event.at):
            if isinstance(event, Life):
                if event.what == "stopped":  # By request, not by the second model.
                    openings.clear()
                continue
            if isinstance(event, ServingOpened):
                openings[event.version] += 1
                continue
            openings[event.version] = 0
            if event.failed:
                self._failed.add(event.version)
            elif event.candidate >= 0:
                self._measured.add((event.version, event.candidate))
        for version, count in openings.items():
            if count >= MOST_OPENINGS and version not in self._failed:
                self._fail(version, f"the process ended {count} times with a second model")

    def measure(self, *, candidate: int | None = None) -> None:
        """Measures the version that serves for a ``candidate`` that was evaluated just now, and for
        the one at the gate. Without decisions it does nothing, and asks for them once a candidate
        only."""
        self._due = self._due if candidate is None else candidate
        if not (self._whole or self._sets) or (self._due is None and self._log.newest is None):
            return
        if self._due is None and time.monotonic() - self._asked_at < POLL_EVERY_S:
            return
        self._asked_at = time.monotonic()
        # Neither an outage nor a series that someone cut off ends the evaluation of versions.
        with suppress(RetryError, SignatureError):
            self._log.poll()
            self._measure()

    def _measure(self) -> None:
        decision, wanted = self._log.newest, []
        if decision is None or decision.serving.upstream:
            self._due = None
            return
        at_gate = decision.candidate if decision.verdict == "gate" else None
        if at_gate is not None and not at_gate.upstream:
            wanted.append(at_gate.version)
        if self._due is not None and self._due > decision.serving.version:
            wanted.append(self._due)
        for candidate in wanted:
            self._measure_for(candidate, decision.serving.version)
        self._due = None

    def _measure_for(self, candidate: int, version: int) -> None:
        if (version, candidate) in self._measured or version in self._failed:
            return
        try:
            served = self._at(version)
        # It was pruned, or there is no memory for it: the gate goes on without.
        except (CorruptError, InputError, ResyncError, MemoryError, RuntimeError) as error:
            self._fail(version, str(error) or type(error).__name__)
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
                candidate=candidate,
                seconds=ended - began,
                correct=whole,
                sets=found,
            )
        )
        self._process.events.flush()
        self._measured.add((version, candidate))

    def _fail(self, version: int, why: str) -> None:
        """Record that a version cannot be measured, so that the gate does not wait for it."""
        self._failed.add(version)
        self._process.events.record(
            ServingMeasured(
                process=self._process.name,
                at=self._process.events.now(),
                version=version,
                failed=why[:MOST_REASON],
                seconds=0.0,
            )
        )
        self._process.events.flush()

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
        now = self._process.events.now()
        self._process.events.record(
            ServingOpened(process=self._process.name, at=now, version=version)
        )
        self._process.events.flush()
        with self._process.heartbeat.long_task("start"):
            self._served, _ = serve_policy(
                self._process,
                self._run,
                self._config,
                engine="transformers",
                # Other draws than those of the candidate, of earlier models and earlier lives.
                seed=self._seed(version),
                slots=self._config.evaluate.slots,
                at=version,
                weights=self._config.rollout.weights,
                stepwise=True,
            )
        return self._served

    def _seed(self, version: int) -> int:
        life = int(self._process.nonce, 16) % 2**31
        return self._config.seed + life + 1_000_003 * self._opened + version

    async def _answered(self, served: ServedPolicy) -> dict[str, list[float]]:
        """Return the share correct of each problem of each set."""
        rollout, samples = self._config.rollout, self._config.evaluate.samples
        sources = {"accuracy": served.tasks} if self._whole else {}
        sources |= self._sets
        found = {}
        for name, source in sources.items():
            problems = source.heldout()[: self._most]
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
