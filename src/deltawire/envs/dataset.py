"""Tasks from the rows of a file: JSONL, Parquet, or a saved Hugging Face dataset.

::

    [task]
    environment = "dataset"
    messages = [{ role = "user", content = "{question}" }]
    reward = "my_rewards:reward"      # or data.answer, for an exact match
    heldout = 100

    [task.data]
    path = "data/train.parquet"
    answer = "answer"

A stream of tasks draws each training row once before it draws one again (`deltawire.data.order`). A
run has one stream, of which the trainer gives each worker other positions: so a run draws every row
once an epoch, whatever the number of its workers (`deltawire.rl.control.draws`). The held-out rows
are those of ``data.heldout_split``, or rows that an order which no seed changes puts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from deltawire.config import TaskConfig
from deltawire.config.machine import machine_policy
from deltawire.data import Rows, open_rows, permuted, require_columns, stream_seed, take
from deltawire.envs.base import Message, Task
from deltawire.envs.own_reward import OwnReward, json_columns
from deltawire.envs.questions import QuestionEpisode
from deltawire.envs.templates import as_text, messages_in, prompt_of
from deltawire.errors import InputError

_HELDOUT_SEED = 977_003
"""Runs of every seed are compared on the same rows."""


class DatasetTasks:
    """A `TaskSource` over rows.

    Raises `InputError` for data that cannot be read, a column that is missing, a reward that
    cannot be loaded, and data with no rows left to train on.

    Example::

        tasks = DatasetTasks(config, seed=0)
        task = tasks.draw("worker", 0)
        episode = tasks.open(task)
    """

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        assert config.data is not None
        self._config, self._data, self._seed = config, config.data, seed
        path = machine_policy().require_data(self._data.path, "task.data.path")
        self._name = path.stem[:64] or "data"
        self._rows = open_rows(path, split=self._data.split)
        self._check(self._rows, str(path))
        if self._data.heldout_split:
            self._held = open_rows(path, split=self._data.heldout_split)
            self._check(self._held, f"{path}, split {self._data.heldout_split}")
            held = np.arange(min(config.heldout, len(self._held)))
            self._train = np.arange(len(self._rows))
        else:
            self._held = self._rows
            order = permuted(len(self._rows), _HELDOUT_SEED, 0)
            held, self._train = order[: config.heldout], np.sort(order[config.heldout :])
        if not len(self._train):
            raise InputError(
                f"{path} has {len(self._rows)} rows, and {config.heldout} are held out",
                hint="lower task.heldout, or set data.heldout_split",
            )
        prefix = "heldout-" if self._data.heldout_split else ""
        self._heldout = [self._task(self._held, int(number), prefix) for number in held]
        self.deterministic = not config.reward
        self._reward = None
        if config.reward:
            self._reward = OwnReward(config.reward, limit_s=config.reward_limit_s)

    @property
    def epoch(self) -> int:
        """The number of rows that are trained on."""
        return len(self._train)

    def draw(self, stream: str, index: int) -> Task:
        """Draws a training row; a stream draws each of them once an epoch.

        Without ``data.shuffle`` a stream follows the order of the file, from a separate place.
        """
        seed, count = stream_seed(self._seed, stream), len(self._train)
        if self._data.shuffle:
            place = take(index, count, seed=seed)[1]
        else:
            place = (seed + index) % count
        return self._task(self._rows, int(self._train[place]))

    def heldout(self) -> list[Task]:
        """The rows that are never drawn."""
        return self._heldout

    def open(self, task: Task) -> QuestionEpisode:
        """Opens a fresh episode of ``task``."""
        config = self._config
        score = partial(self._score, task)
        return QuestionEpisode(score, self.prompt(task), config.attempts, config.retry)

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """The prompt, or its messages."""
        if column := self._data.messages:
            return messages_in(task.data[column], source=f"column {column!r} of {task.identity}")
        return prompt_of(self._config, task.data)

    def answer(self, task: Task) -> str:
        """The correct answer; raises `InputError` if ``data.answer`` names no column."""
        if not self._data.answer:
            raise InputError(
                f"the data at {self._data.path} has no column with answers",
                hint="set task.data.answer, or warm_start.max_steps to 0",
            )
        return as_text(task.data[self._data.answer])

    def question(self, task: Task) -> str:
        """The text that identifies the task."""
        return task.identity

    async def _score(self, task: Task, completion: str) -> float:
        if self._reward is not None:
            return await self._reward(completion, json_columns(task.data))
        return float(completion == self.answer(task).strip())

    def _check(self, rows: Rows, source: str) -> None:
        data = self._data
        named = {data.messages} if data.messages else self._config.placeholders
        named |= {data.answer, data.identity, data.family}
        require_columns(rows, sorted(named - {""}), source=source)

    def _task(self, rows: Rows, number: int, prefix: str = "") -> Task:
        row: dict[str, Any] = rows[number]
        data = self._data
        named = {data.messages, data.answer, data.identity, data.family} - {""}
        named |= set() if data.messages else self._config.placeholders
        if missing := sorted(named - row.keys()):
            raise InputError(f"row {number} of {data.path} has no column {missing[0]!r}")
        identity = as_text(row[data.identity]) if data.identity else f"{prefix}{number}"
        family = as_text(row[data.family]) if data.family else self._name
        return Task(f"{self._name}/{identity}"[:256], row, family[:64])
