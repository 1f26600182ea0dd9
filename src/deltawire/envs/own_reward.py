"""Scores answers by a reward function of the user's, called in a separate process.

::

    def reward(completion: str, row: dict) -> float:
        return float(completion.strip() == row["answer"])

with ``task.reward = "my_rewards:reward"``. ``completion`` is the model's answer without tool calls
and special tokens; ``row`` is the task's row, every column of it that JSON can hold. The module
must be one that this machine trusts. The process has limits on time and memory and
gets none of this process's credentials (`deltawire.envs.scoring_process`).

A function that raises, takes too long, or returns no finite number makes its episode a failed one,
with the cause: it is counted and not trained on, and too many of them stop the run
(``rollout.max_failed``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from deltawire.config.own_code import require_code
from deltawire.envs.scoring_process import ScoringError, ScoringProcess, ScoringTimeoutError
from deltawire.errors import InputError


class OwnReward:
    """A reward function that a configuration names.

    Raises `InputError` if the machine does not trust the module, or the function cannot be loaded.

    Example::

        reward = OwnReward("my_rewards:reward", limit_s=10.0)
        score = await reward("42", {"answer": "42"})
    """

    def __init__(self, place: str, *, limit_s: float) -> None:
        require_code("task.reward", place)
        self._place = place
        self._process = _process(place, limit_s)
        try:
            self._process.start()
        except (ScoringError, ScoringTimeoutError, EOFError) as error:
            raise InputError(
                f"cannot load task.reward {place}: {str(error) or 'its process died'}",
                hint="name a function of a module that python can import",
            ) from error

    async def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        """Scores one answer; raises `ScoringError` or `ScoringTimeoutError`, naming the
        function."""
        try:
            return await self._process(completion, row)
        except (ScoringError, ScoringTimeoutError) as error:
            raise type(error)(f"task.reward {self._place}: {error}") from error


@cache
def _process(place: str, limit_s: float) -> ScoringProcess:
    """One process for each function, however many tasks use it."""
    return ScoringProcess(place, limit_s=limit_s)


def json_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that JSON can hold."""
    kept = {}
    for name, value in row.items():
        try:
            kept[str(name)] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            continue
    return kept
