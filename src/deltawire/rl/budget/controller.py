"""Controller: applies the newest decision about a run's compute in its trainer.

::

    evaluator   measures the settings ─▶ decides ─▶ Evaluated and Controlled, stored at once
    trainer     reads Controlled      ─▶ trainer.json (thinking, completions, scaffold)
                                      ─▶ its own steps (optimizer steps of a version)
    worker      starts groups as trainer.json says; groups under way keep what they began with

The evaluator decides (`deltawire.rl.budget.decision`) and records each decision together with the
measurements that it follows from, those of the last version too. A trainer that starts again reads
the same events and reaches the same setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deltawire.config import RunConfig
from deltawire.estimates import BudgetSetting
from deltawire.events import Controlled
from deltawire.rl.budget.limits import BudgetLimits
from deltawire.runtime.event_tail import EventTail
from deltawire.store import Bucket

POLL_S = 1.0
"""Seconds from one reading of the evaluator's events to the next."""


class BudgetFollower:
    """Follows the decisions of a run's controller.

    A setting outside the run's limits is not followed: nothing read from a bucket is trusted.

    Example::

        follower = BudgetFollower(bucket, config)
        follower.poll()   # BudgetSetting(thinking=512, …), None without a controller
    """

    def __init__(
        self, bucket: Bucket, config: RunConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = BudgetLimits.of(config) if config.budget.controller == "auto" else None
        self._tail = EventTail(bucket, processes=("evaluator",))
        self._clock = clock
        self._due_at = float("-inf")
        self._version = -1
        self._setting = self._limits.first if self._limits else None

    def poll(self) -> BudgetSetting | None:
        """Returns the setting of groups and steps that start now; None without a controller."""
        limits, now = self._limits, self._clock()
        if limits is None or now < self._due_at:
            return self._setting
        first, self._due_at = self._due_at < 0, now + POLL_S
        for event in self._tail.read(everything=first):
            if not isinstance(event, Controlled) or event.version <= self._version:
                continue
            if limits.allows(event.after):
                self._version, self._setting = event.version, event.after
        return self._setting
