"""reasoning-gym: every one of its datasets by name, with its own problems and its own scores."""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from deltawire.config import TaskConfig
from deltawire.envs.base import Action, Environment, Task, Turn
from deltawire.envs.scoring_process import ScoringProcess, ScoringTimeoutError
from deltawire.errors import InputError

BLOCK = 500
"""Problems asked of one dataset object before the next seed's takes over; some datasets do work
in proportion to their size when they are made."""
_CACHED = 8
_SEARCH_PER_HELDOUT = 50
_HELDOUT_SEED = 977_003
"""Where held-out problems are drawn from, whatever the run's seed: runs compare on the same."""

SCORE_LIMIT_S = 10.0
"""How long a dataset may take over one answer."""
MAKE_LIMIT_S = 100.0
"""How long one may take to make a problem; some search for theirs."""

T = TypeVar("T")

_HARMLESS = {"chain_sum", "products", "spell_backward"}
"""Scorers that compare and count, as their code shows, besides those that datasets inherit. All
others work in a process of their own: some of them evaluate the answer."""

_HASH_ORDERED = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
"""Datasets that iterate over sets of strings: their problems follow the interpreter's hash seed."""


def _hash_seed_varies() -> bool:
    return bool(sys.flags.hash_randomization)


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Some datasets draw from the interpreter's own generators besides the one they are given; a
    problem must be the same in every process all the same."""
    plain, arrays = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        with redirect_stdout(io.StringIO()):  # some print what they make
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)


def _seed(*parts: object) -> int:
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class _Episode(Environment):
    """One problem and one answer, or several; the reward is the dataset's own score of the last,
    in 0 … 1."""

    score: Callable[[str], Awaitable[float]]
    prompt: str
    attempts: int = 1
    retry: str = ""

    async def reset(self) -> Turn:
        return Turn(self.prompt)

    async def step(self, action: Action) -> Turn:
        self.attempts -= 1
        score = await self.score((action.content or action.text).strip())
        if score < 1.0 and self.attempts > 0:
            return Turn(self.retry)
        return Turn(reward=score, done=True)


_judge = ScoringProcess("deltawire.envs.reasoning:score_elsewhere", limit_s=SCORE_LIMIT_S)
_scorers: dict[str, Any] = {}
_entries: dict[str, dict[str, Any]] = {}


def score_elsewhere(
    name: str, options: str, seed: int, position: int, entry: Any, answer: str | None
) -> float:
    """A dataset's own score of an answer; what `ScoringProcess` calls in its child process.

    ``options`` are JSON. A problem that JSON cannot hold (``entry`` None) is made again from its
    ``seed`` and ``position``; without an ``answer``, that is all.
    """
    dataset = _remember(
        _scorers, f"{name} {seed} {options}", lambda: _create(name, seed, json.loads(options))
    )
    if entry is None:
        key = f"{name} {seed} {options} {position}"
        entry = _remember(_entries, key, lambda: _entry(dataset, seed, position))
    return 0.0 if answer is None else _score(dataset, entry, answer)


def _remember(memory: dict[str, T], key: str, make: Callable[[], T]) -> T:
    if key not in memory:
        while len(memory) >= _CACHED:
            memory.pop(next(iter(memory)))
        memory[key] = make()
    return memory[key]


def _entry(dataset: Any, seed: int, position: int) -> dict[str, Any]:
    with _own_randomness(_seed(seed, position)):
        entry: dict[str, Any] = dataset[position % len(dataset)]
    return entry


def _as_json(entry: dict[str, Any]) -> dict[str, Any] | None:
    """The entry, if it comes back from JSON as it was."""
    try:
        return entry if json.loads(json.dumps(entry)) == entry else None
    except (TypeError, ValueError):
        return None


def _score(dataset: Any, entry: dict[str, Any], answer: str) -> float:
    try:
        with redirect_stdout(io.StringIO()):
            score = float(dataset.score_answer(answer, entry))
    except Exception:  # some datasets parse what the model wrote without a net
        return 0.0
    # A score that is no number is the dataset's fault, and told as such.
    return min(max(score, 0.0), 1.0) if score == score else score  # noqa: PLR0124


def _create(name: str, seed: int, options: dict[str, Any]) -> Any:
    settings = {"size": BLOCK, "seed": seed, **options}
    if name == "composite":
        specs = settings.get("datasets", ())
        settings["datasets"] = [DatasetSpec(**{"config": {}, **spec}) for spec in specs]
    with _own_randomness(seed):
        return reasoning_gym.create_dataset(name, **settings)


class ReasoningTasks:
    """A `TaskSource` over one dataset.

    Held-out problems are the first distinct ones of a seed of their own; drawing skips every
    problem whose question is among them. Raises `InputError` for an unknown dataset (naming the
    nearest), for options that the dataset refuses, for one too small to hold problems out, and for
    one whose problems would differ between processes.
    """

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._datasets: dict[int, Any] = {}
        self._options = json.dumps(config.options, default=str)
        if config.dataset not in DATASETS:
            near = difflib.get_close_matches(config.dataset, DATASETS, n=1, cutoff=0.4)
            raise InputError(
                f"reasoning-gym has no dataset {config.dataset!r}",
                hint=f"did you mean {near[0]}?" if near else "see the reasoning-gym gallery",
            )
        if config.dataset in _HASH_ORDERED and _hash_seed_varies():
            raise InputError(
                f"the problems of dataset {config.dataset} differ from process to process",
                hint="set PYTHONHASHSEED=0 in the environment of every deltawire process",
            )
        if "seed" in config.options:
            raise InputError(
                "task.options.seed would give every worker the same problems",
                hint="set the run's own seed",
            )
        scorer = type(self._dataset(_seed(_HELDOUT_SEED, 0))).score_answer
        self._scores_here = config.dataset in _HARMLESS or scorer is ProceduralDataset.score_answer
        self._heldout = self._hold_out()
        self._reserved = {task.data["question"] for task in self._heldout}

    def heldout(self) -> list[Task]:
        """The problems that are never drawn; the same for every seed of the run."""
        return self._heldout

    def draw(self, stream: str, index: int) -> Task:
        """Problem ``index`` of a stream; raises `InputError` if all seem to be held out."""
        block, position = divmod(index, BLOCK)
        for attempt in range(_SEARCH_PER_HELDOUT):
            seed = _seed(self._seed, stream, block, attempt // BLOCK)
            task = self._task(seed, (position + attempt) % BLOCK)
            if task.data["question"] not in self._reserved:
                return task
        raise InputError(
            f"dataset {self._config.dataset} has too few problems besides the held-out ones",
            hint="lower task.heldout, or widen task.options",
        )

    def open(self, task: Task) -> _Episode:
        """A fresh episode of ``task``."""
        return _Episode(
            partial(self._score, task),
            self.prompt(task),
            self._config.attempts,
            self._config.retry,
        )

    async def _score(self, task: Task, answer: str) -> float:
        if self._scores_here:
            return _score(self._dataset(_seed(_HELDOUT_SEED, 0)), task.data, answer)
        name, entry = self._config.dataset, _as_json(task.data)
        seed, position = _HELDOUT_SEED, 0
        if entry is None:
            seed, position = map(int, task.identity.split("/")[-2:])
            await _judge(name, self._options, seed, position, None, None, limit_s=MAKE_LIMIT_S)
        try:
            return await _judge(name, self._options, seed, position, entry, answer)
        except ScoringTimeoutError:
            return 0.0  # The model wrote something that takes for ever; it must not pay.

    def answer(self, task: Task) -> str:
        """The dataset's own answer, for supervised steps; raises `InputError` if it has none."""
        if task.data["answer"] is None:
            raise InputError(
                f"dataset {self._config.dataset} scores answers but knows none",
                hint="set warm_start.max_steps to 0",
            )
        return str(task.data["answer"])

    def prompt(self, task: Task) -> str:
        """The text before the answer."""
        return self._config.prompt.replace("{question}", task.data["question"])

    def question(self, task: Task) -> str:
        """What makes two problems the same."""
        return str(task.data["question"])

    def _dataset(self, seed: int) -> Any:
        if seed not in self._datasets:
            while len(self._datasets) >= _CACHED:
                self._datasets.pop(next(iter(self._datasets)))
            try:
                self._datasets[seed] = _create(self._config.dataset, seed, self._config.options)
            except Exception as error:  # datasets check their options by assert and otherwise
                raise InputError(
                    f"dataset {self._config.dataset} refuses task.options: {error}"
                ) from error
        return self._datasets[seed]

    def _task(self, seed: int, position: int) -> Task:
        entry = _entry(self._dataset(seed), seed, position)
        return Task(f"{self._config.dataset}/{seed}/{position}", entry, self._config.dataset)

    def _hold_out(self) -> list[Task]:
        found: dict[str, Task] = {}
        for number in range(self._config.heldout * _SEARCH_PER_HELDOUT):
            block, position = divmod(number, BLOCK)
            task = self._task(_seed(_HELDOUT_SEED, block), position)
            found.setdefault(task.data["question"], task)
            if len(found) == self._config.heldout:
                return list(found.values())
        raise InputError(
            f"dataset {self._config.dataset} has only {len(found)} distinct problems",
            hint="lower task.heldout, or widen task.options",
        )
