"""Counts episodes that fail for reasons other than the model; too many stop the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from deltawire.config import RolloutConfig
from deltawire.envs.base import Task
from deltawire.errors import InputError
from deltawire.rl.rollout.episode_types import Episode

WINDOW = 64
"""The least number of episodes over which the share of failed ones is computed."""


class FailureBudget:
    """The failed episodes of one worker, and how many more may fail."""

    def __init__(self, rollout: RolloutConfig, worker: str) -> None:
        self.count = 0
        self._rollout = rollout
        self._worker = worker
        self._recent: deque[bool] = deque(maxlen=max(WINDOW, 4 * rollout.group_size))

    def add(self, task: Task, episodes: Sequence[Episode]) -> None:
        """Counts a group's failures; raises `InputError`, which names the first cause, once there
        are more than the configuration allows."""
        failed = [episode.cause for episode in episodes if episode.cause]
        self.count += len(failed)
        self._recent.extend(bool(episode.cause) for episode in episodes)
        if not failed:
            return
        share = sum(self._recent) / len(self._recent)
        full = len(self._recent) == self._recent.maxlen
        if self._rollout.on_failure == "stop":
            reason = "an episode failed"
        elif full and share > self._rollout.max_failed:
            reason = f"{share:.0%} of the last {len(self._recent)} episodes failed"
        else:
            return
        raise InputError(
            f"worker {self._worker}: {reason}, at task {task.identity[:80]}: {failed[0]}",
            hint="repair the environment, or see rollout.on_failure and rollout.max_failed",
        )
