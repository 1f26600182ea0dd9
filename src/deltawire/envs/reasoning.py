"""Tasks from reasoning-gym: every dataset by name, with its own problems and its own scores."""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from deltawire.config import TaskConfig
from deltawire.envs.base import Message, Task
from deltawire.envs.evaluated_answers import evaluate_in_sandbox, evaluating
from deltawire.envs.own_reward import OwnReward, json_columns
from deltawire.envs.questions import QuestionEpisode
from deltawire.envs.sandbox.box import Sandbox
from deltawire.envs.sandbox.evaluator import Evaluator
from deltawire.envs.scoring_process import ScoringProcess, ScoringTimeoutError
from deltawire.envs.templates import prompt_of
from deltawire.errors import InputError

BLOCK = 500
"""Problems per dataset object, before the next seed is used; some datasets do work in proportion to
their size when they are made."""
_CACHED = 8
_SEARCH_PER_HELDOUT = 50
_HELDOUT_SEED = 977_003
"""The seed of held-out problems, whatever the run's seed: runs are compared on the same ones."""

SCORE_LIMIT_S = 20.0
"""How long a dataset may take to score one answer."""
MAKE_LIMIT_S = 100.0
"""How long a dataset may take to make a problem; some search for theirs."""

T = TypeVar("T")

_SCORED_HERE = {"chain_sum", "products", "spell_backward"}
"""Datasets whose scorers only compare and count, next to those that inherit theirs. All others run
in a process of their own."""

_HASH_ORDERED = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
"""Datasets that iterate over sets of strings: their problems depend on the interpreter's hash
seed."""


def require_dataset(name: str) -> None:
    """Raises `InputError` unless reasoning-gym has a dataset of this name."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.4)
        raise InputError(
            f"reasoning-gym has no dataset {name!r}",
            hint=f"did you mean {near[0]}?" if near else "see the reasoning-gym gallery",
        )


def _hash_seed_varies() -> bool:
    return bool(sys.flags.hash_randomization)


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Seeds the interpreter's global generators, from which some datasets draw: a problem must be
    the same in every process."""
    plain, arrays = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        with redirect_stdout(io.StringIO()):  # Some print what they make.
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)


def _seed(*parts: object) -> int:
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


_scoring = ScoringProcess("deltawire.envs.reasoning:score_elsewhere", limit_s=SCORE_LIMIT_S)
_scorers: dict[str, Any] = {}
_entries: dict[str, dict[str, Any]] = {}


@cache
def _evaluator() -> Evaluator:
    """The sandbox of this process, which is the scoring process."""
    return Evaluator()


def score_elsewhere(
    name: str, options: str, seed: int, position: int, entry: Any, answer: str | None
) -> float:
    """Scores an answer as the dataset does; `ScoringProcess` calls it in its child process.

    ``options`` are JSON. A problem that JSON cannot hold (``entry`` None) is made again from its
    ``seed`` and ``position``; without an ``answer``, nothing is scored. Answers that a scorer would
    evaluate as code are evaluated in a sandbox.
    """
    dataset = _remember(_scorers, f"{name} {seed} {options}", lambda: _scorer(name, seed, options))
    if entry is None:
        key = f"{name} {seed} {options} {position}"
        entry = _remember(_entries, key, lambda: _entry(dataset, seed, position))
    return 0.0 if answer is None else _score(dataset, entry, answer)


def _scorer(name: str, seed: int, options: str) -> Any:
    dataset = _create(name, seed, json.loads(options))
    if evaluating(dataset):
        evaluate_in_sandbox(dataset, _evaluator())
    return dataset


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
    """The entry if JSON can hold it, else None."""
    try:
        return entry if json.loads(json.dumps(entry)) == entry else None
    except (TypeError, ValueError):
        return None


def _score(dataset: Any, entry: dict[str, Any], answer: str) -> float:
    try:
        with redirect_stdout(io.StringIO()):
            score = float(dataset.score_answer(answer, entry))
    except Exception:  # Some datasets parse answers without catching errors.
        return 0.0
    # A score of NaN is the dataset's fault, and is reported as such by the caller.
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

    Held-out problems are the first distinct ones of a fixed seed; drawing skips every problem whose
    question is among them. Raises `InputError` for an unknown dataset (naming the nearest), for
    options that the dataset refuses, for one too small to hold problems out, for one whose problems
    would differ between processes, and for one that evaluates answers where there is no sandbox.

    Example::

        tasks = ReasoningTasks(TaskConfig(dataset="countdown"), seed=0)
        episode = tasks.open(tasks.draw("worker-0", 0))
    """

    deterministic = True

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._datasets: dict[int, Any] = {}
        self._options = json.dumps(config.options, default=str)
        require_dataset(config.dataset)
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
        dataset = self._dataset(_seed(_HELDOUT_SEED, 0))
        own = type(dataset).score_answer is not ProceduralDataset.score_answer
        self._scores_here = config.dataset in _SCORED_HERE or not own
        if not self._scores_here and evaluating(dataset):
            _require_sandbox(config.dataset)
        self.may_time_out = not self._scores_here and not config.reward
        self.deterministic = not config.reward
        self._reward = None
        if config.reward:
            self._reward = OwnReward(config.reward, limit_s=config.reward_limit_s)
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
            f"dataset {self._config.dataset} has too few problems that are not held out",
            hint="lower task.heldout, or widen task.options",
        )

    def open(self, task: Task) -> QuestionEpisode:
        """A fresh episode of ``task``."""
        return QuestionEpisode(
            partial(self._score, task),
            self.prompt(task),
            self._config.attempts,
            self._config.retry,
        )

    async def _score(self, task: Task, answer: str) -> float:
        if self._reward is not None:
            return await self._reward(answer, json_columns(task.data))
        if self._scores_here:
            return _score(self._dataset(_seed(_HELDOUT_SEED, 0)), task.data, answer)
        name, entry = self._config.dataset, _as_json(task.data)
        seed, position = _HELDOUT_SEED, 0
        if entry is None:
            seed, position = map(int, task.identity.split("/")[-2:])
            await _scoring(name, self._options, seed, position, None, None, limit_s=MAKE_LIMIT_S)
        try:
            return await _scoring(name, self._options, seed, position, entry, answer)
        except ScoringTimeoutError:
            return 0.0  # An answer that takes too long to score must not pay.

    def answer(self, task: Task) -> str:
        """The dataset's own answer, for supervised steps; raises `InputError` if it has none."""
        if task.data["answer"] is None:
            raise InputError(
                f"dataset {self._config.dataset} scores answers but knows none",
                hint="set warm_start.max_steps to 0",
            )
        return str(task.data["answer"])

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """The text before the answer, or the messages."""
        return prompt_of(self._config, {"question": task.data["question"]})

    def question(self, task: Task) -> str:
        """The text that identifies the problem."""
        return str(task.data["question"])

    def _dataset(self, seed: int) -> Any:
        if seed not in self._datasets:
            while len(self._datasets) >= _CACHED:
                self._datasets.pop(next(iter(self._datasets)))
            try:
                self._datasets[seed] = _create(self._config.dataset, seed, self._config.options)
            except Exception as error:  # Datasets check their options by assertions, among others.
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


def _require_sandbox(dataset: str) -> None:
    """Raises `InputError` if this machine has no sandbox to evaluate answers in."""
    try:
        Sandbox().check_now()
    except InputError as error:
        raise InputError(
            f"dataset {dataset} evaluates answers as code, and this machine gives no sandbox: "
            f"{error}",
            hint="allow user namespaces (or run as root), or choose another dataset",
        ) from error
