"""Tasks that are the requests of simulated users (`deltawire.testing.users`).

A warm start on them teaches all styles of answers equally often; the reward of an answer is its
true satisfaction over that of the best answer. Live runs use them to start from a model that
answers at all, and to evaluate versions against what users like in truth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import msgspec

from deltawire.config import RunConfig, TaskConfig
from deltawire.envs.base import Message, Task
from deltawire.envs.questions import QuestionEpisode
from deltawire.envs.templates import prompt_of
from deltawire.errors import InputError
from deltawire.testing.users import ANSWERS, KINDS, STYLES, Population, UserSettings
from deltawire.testing.users.population import request_text

TEXTS = 144


class SimulatedUserTasks:
    """A `TaskSource` over a population's requests; ``task.options`` are its `UserSettings`.

    Raises `InputError` for options that are not.

    Example::

        config = TaskConfig(environment="simulated_users", options={"users": 50})
        tasks = SimulatedUserTasks(config, seed=0)
        tasks.answer(tasks.draw("w0", 0))   # the text of one of the styles
    """

    deterministic = True

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        self._config, self._seed = config, seed
        try:
            settings = msgspec.convert({"seed": seed, **config.options}, UserSettings)
        except msgspec.ValidationError as error:
            raise InputError(f"task.options of simulated_users: {error}") from error
        self.population = Population(settings)
        tastes = self.population.tastes()
        self._shares = tastes / tastes.max(axis=1, keepdims=True)
        every = [_task(kind, text) for kind in range(settings.kinds) for text in range(TEXTS)]
        random.Random(977_003).shuffle(every)
        if config.heldout >= len(every):
            raise InputError(
                f"there are {len(every)} requests, and {config.heldout} are held out",
                hint="lower task.heldout",
            )
        self._heldout, self._train = every[: config.heldout], every[config.heldout :]

    def heldout(self) -> list[Task]:
        """The requests that are never drawn."""
        return self._heldout

    def draw(self, stream: str, index: int) -> Task:
        """Draws request ``index`` of a stream."""
        return random.Random(f"{self._seed}/{stream}/{index}").choice(self._train)

    def open(self, task: Task) -> QuestionEpisode:
        """A fresh episode of ``task``."""
        return QuestionEpisode(partial(self._score, task), self.prompt(task))

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """The text that a user sends."""
        return prompt_of(self._config, {"question": self.question(task)})

    def question(self, task: Task) -> str:
        """The request without its line end."""
        kind, text = task.data
        return request_text(kind, text).rstrip("\n")

    def answer(self, task: Task) -> str:
        """An answer to learn from: each style for an equal share of the requests."""
        return ANSWERS[random.Random(f"style/{task.identity}").choice(STYLES)]

    async def _score(self, task: Task, answer: str) -> float:
        for place, text in enumerate(ANSWERS.values()):
            if text == answer:
                return float(self._shares[task.data[0], place])
        return 0.0


def covered_kinds(config: RunConfig) -> int:
    """Returns how many kinds of requests, from the first, the gate's named suites cover.

    Raises `InputError` if they cover all kinds: then users see nothing that suites do not.
    """
    suites = [one.task for one in config.evaluate.sets if one.name in config.live.release.gate]
    covered = max((_kinds(task, config.seed) for task in suites), default=0)
    if not 0 < covered < _kinds(config.task, config.seed) or "accuracy" in config.live.release.gate:
        raise InputError(
            "live.planted.users needs a gate by named suites that leave out some kinds of requests",
            hint="see [[evaluate.sets]] and [live.release.gate] in examples/live.toml",
        )
    return covered


def _kinds(task: TaskConfig, seed: int) -> int:
    return SimulatedUserTasks(task, seed=seed).population.settings.kinds


def _task(kind: int, text: int) -> Task:
    return Task(f"{KINDS[kind]}/{text}", (kind, text), family=KINDS[kind])
