"""Tasks whose answers need serial steps: each step follows from the one before.

``parity``
    ``0110__=`` asks for the parity of the bits; the worked steps are the parities of its prefixes,
    ``0100``.
``permutation``
    ``acb___=`` composes swaps of three items: ``a`` of the first two, ``b`` of the last two, ``c``
    of the outer two. A step is the number, 0 to 5, of the permutation so far.

A transformer of constant depth needs about one generated token a step to solve them (Merrill and
Sabharwal, arXiv 2310.07923; Li et al., arXiv 2402.12875), so longer thinking pays, and a budget
that is shorter than the task forces a guess. A warm start shows a share of the tasks with their
steps and the others without. RL then has to find out that the steps pay.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.config import TaskConfig
from deltawire.envs.base import Message, Task
from deltawire.envs.questions import QuestionEpisode
from deltawire.envs.templates import prompt_of
from deltawire.errors import InputError

_HELDOUT_SEED = 977_003
"""The seed of held-out problems, whatever the run's seed."""
_TRIES = 1000
_SWAPS = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
_NUMBERS = {order: str(number) for number, order in enumerate(permutations(range(3)))}


class SerialOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``task.options``: the lengths of tasks, drawn evenly, the share that a warm start shows with
    their steps, and the marks around the steps."""

    min_length: Annotated[int, Meta(ge=1, le=4096)] = 4
    max_length: Annotated[int, Meta(ge=1, le=4096)] = 16
    chain_share: Annotated[float, Meta(ge=0, le=1)] = 0.35
    start: Annotated[str, Meta(max_length=64)] = "<think>"
    end: Annotated[str, Meta(max_length=64)] = "</think>"


class SerialTasks:
    """A `TaskSource` of parity or permutation tasks; ``task.dataset`` names which.

    Raises `InputError` for another dataset, and for options that do not fit.

    Example::

        config = TaskConfig(environment="serial_steps", dataset="parity")
        tasks = SerialTasks(config, seed=0)
        tasks.answer(tasks.draw("w0", 0))   # "<think>0100</think>0", or without the steps
    """

    deterministic = True

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        if config.dataset not in _STEPS:
            raise InputError(
                f"the environment serial_steps has no dataset {config.dataset!r}",
                hint=f"set task.dataset to {' or '.join(sorted(_STEPS))}",
            )
        try:
            self._options = msgspec.convert(config.options, SerialOptions)
        except msgspec.ValidationError as error:
            raise InputError(f"task.options of serial_steps: {error}") from error
        if self._options.min_length > self._options.max_length:
            raise InputError("task.options: min_length exceeds max_length")
        self._heldout = self._hold_out()
        self._reserved = {str(task.data) for task in self._heldout}

    def heldout(self) -> list[Task]:
        """The problems that are never drawn; the same for every seed of the run."""
        return self._heldout

    def draw(self, stream: str, index: int) -> Task:
        """Problem ``index`` of a stream; raises `InputError` if all seem to be held out."""
        for attempt in range(_TRIES):
            task = self._task(self._seed, stream, index, attempt)
            if task.data not in self._reserved:
                return task
        raise InputError(
            "too few tasks of serial_steps are not held out",
            hint="lower task.heldout, or raise task.options.max_length",
        )

    def open(self, task: Task) -> QuestionEpisode:
        """A fresh episode of ``task``."""
        return QuestionEpisode(
            partial(self._score, task), self.prompt(task), self._config.attempts, self._config.retry
        )

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """The text before the answer, or the messages."""
        return prompt_of(self._config, {"question": self.question(task)})

    def question(self, task: Task) -> str:
        """The text that identifies the problem, as long as that of the longest one: a step is then
        equally far from what it reads in every task, which a small model learns soon."""
        return f"{str(task.data).ljust(self._options.max_length, '_')}="

    def answer(self, task: Task) -> str:
        """The correct answer, for a share of the tasks with its steps."""
        options, steps = self._options, self.steps(task)
        shown = random.Random(f"shown/{task.data}").random() < options.chain_share
        return f"{options.start}{steps if shown else ''}{options.end}{steps[-1]}"

    def steps(self, task: Task) -> str:
        """The result after each step, one character a step; the last one is the answer."""
        return _STEPS[self._config.dataset](str(task.data))

    async def _score(self, task: Task, answer: str) -> float:
        answer = answer.rpartition(self._options.end)[2].strip()
        return float(answer == self.steps(task)[-1])

    def _task(self, *place: object) -> Task:
        digest = hashlib.blake2b(json.dumps(place).encode(), digest_size=8).digest()
        random_ = random.Random(digest)
        length = random_.randint(self._options.min_length, self._options.max_length)
        letters = "01" if self._config.dataset == "parity" else "".join(_SWAPS)
        data = "".join(random_.choice(letters) for _ in range(length))
        return Task(f"{self._config.dataset}/{data}", data, f"{self._config.dataset}-{length}")

    def _hold_out(self) -> list[Task]:
        found: dict[str, Task] = {}
        for number in range(self._config.heldout * _TRIES):
            task = self._task(_HELDOUT_SEED, number)
            found.setdefault(str(task.data), task)
            if len(found) == self._config.heldout:
                return list(found.values())
        raise InputError(
            f"serial_steps has only {len(found)} distinct tasks of these lengths",
            hint="lower task.heldout, or raise task.options.max_length",
        )


def _parities(bits: str) -> str:
    total, steps = 0, []
    for bit in bits:
        total ^= bit == "1"
        steps.append(str(int(total)))
    return "".join(steps)


def _permutations(swaps: str) -> str:
    order, steps = [0, 1, 2], []
    for swap in swaps:
        left, right = _SWAPS[swap]
        order[left], order[right] = order[right], order[left]
        steps.append(_NUMBERS[tuple(order)])
    return "".join(steps)


_STEPS = {"parity": _parities, "permutation": _permutations}
