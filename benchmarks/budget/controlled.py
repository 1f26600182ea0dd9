"""``auto_vs_best_fixed``, ``auto_vs_worst_fixed`` and ``area_gain``: the controller against three
fixed thinking budgets.

The task is the parity of 2 to 12 bits, whose worked steps take a token a bit. A model of 0.9
million parameters starts, with each seed, from supervised steps of which half show the worked
steps. Every arm then makes optimizer steps with the trainer's own `train_step` until it has spent
the same number of tokens, those that it sampled and those that it trained on. ``half``, ``default``
and ``double`` think for up to 4, 8 and 16 tokens. ``auto`` starts with 8 and moves between the
three by `deltawire.rl.budget.decision`; what it samples for its paired evaluations counts as spent.

Accuracy is measured on 300 problems that neither training nor the controller has seen, with the
thinking budget that the arm ends with: it is what a user of that setting gets. The arms and
their tokens were named before the first cell was measured; the rules for errors (`MOST_ERROR`)
after about half of the fixed arms' cells. Nothing depends on time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file

from benchmarks.budget.cells import Cells, mean_and_error
from benchmarks.training.keys import Measured, Options
from deltawire.chat.text import Text
from deltawire.config import RunConfig, parse_config
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import Task, open_tasks
from deltawire.events import Evaluated
from deltawire.rl.budget.decision import BudgetHistory
from deltawire.rl.evaluate.setting_scores import measure_settings
from deltawire.rl.rollout.episode import play_tasks
from deltawire.rl.rollout.episode_types import Episode, EpisodeLimits, group_of
from deltawire.rl.rollout.policy_server import ServedPolicy
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.masters import MasterWeights
from deltawire.train.step import train_step
from deltawire.train.warm_start import warm_start

ARMS: Final[dict[str, list[int]]] = {
    "half": [4],
    "default": [8],
    "double": [16],
    "auto": [4, 8, 16],
}
"""By name, the thinking budgets; with several, the controller moves between them."""
FIXED: Final = ("half", "default", "double")
AREA_ARM: Final = "default"
"""The arm whose area ``area_gain`` is about."""
CURVE: Final = (4, 6, 8, 10, 12, 14, 16)
TOKENS: Final = 160_000
"""Tokens that every arm may spend, sampled and trained."""
EVERY: Final = 6
"""Versions from one paired evaluation of ``auto`` to the next."""
PROBLEMS: Final = 64
"""Problems of a paired evaluation, none of which is in the test set."""
TEST: Final = 300
MOST_ERROR: Final = 0.02
"""A larger standard error of a difference counts as this one: noise does not meet a floor."""
STOP: Final = 256
"""The byte tokenizer's end of text."""


def run_config(budgets: Sequence[int], seed: int) -> RunConfig:
    """The configuration of an arm: ``examples/thinking.toml`` with other budgets."""
    auto = {"controller": "auto", "problems": PROBLEMS, "byte_tokens": 0.0, "second_tokens": 0.0}
    return parse_config(
        {
            "name": "controlled",
            "seed": seed,
            "model": {
                "build": {
                    "hidden_size": 128,
                    "layers": 4,
                    "head_size": 32,
                    "feed_forward_size": 384,
                    "context": 128,
                }
            },
            "task": {
                "environment": "serial_steps",
                "dataset": "parity",
                "options": {
                    "min_length": 2,
                    "max_length": 12,
                    "chain_share": 0.5,
                    "start": "(",
                    "end": ")",
                },
                "prompt": "{question}",
                "heldout": PROBLEMS + TEST,
            },
            "warm_start": {
                "max_steps": 240,
                "stop_at_accuracy": 0.7,
                "check_every": 20,
                "learning_rate": 2e-3,
                "batch": 64,
            },
            "rollout": {
                "group_size": 8,
                "max_tokens": 20,
                "context": 48,
                "slots": 128,
                "thinking": {"start": "(", "end": ")", "budgets": [*budgets], "answer_tokens": 4},
            },
            "train": {"groups_per_step": 16, "optimizer": {"learning_rate": 1e-4}},
            "evaluate": {"every": EVERY, "samples": 2},
            "budget": auto if len(budgets) > 1 else {},
            "trust": {"rescore_share": 0.0},
        },
        source="benchmark",
    )


class Policy:
    """A model, its tasks, and the engine that plays them."""

    def __init__(self, config: RunConfig, seed: int) -> None:
        torch.manual_seed(seed)
        self.config, self.seed = config, seed
        assert config.model.build is not None
        self.model = build_model(config.model.build, seed=seed)
        self.tasks = open_tasks(config.task, seed=seed)
        self.text = Text(byte_tokenizer())
        self.engine = TransformersEngine(
            self.model, stop_tokens=[STOP], slots=128, capacity=48, seed=seed
        )

    def play(self, tasks: Sequence[Task], budget: int) -> list[Episode]:
        """Plays an episode of each task with a thinking budget."""
        self.model.eval()
        limits = replace(EpisodeLimits.of(self.config.rollout), budget=budget)
        return asyncio.run(
            play_tasks(
                self.engine,
                self.tasks,
                self.text,
                tasks,
                temperature=1.0,
                limits=limits,
                concurrent=self.engine.slots,
            )
        )

    def warm(self) -> int:
        """Makes the supervised steps; returns how many."""
        source: Any = self.tasks
        validation = [self.tasks.draw("validation", index) for index in range(200)]
        batch = self.config.warm_start.batch

        def pair(task: Task) -> tuple[list[int], list[int]]:
            answer = [*self.text.encode(source.answer(task)), STOP]
            return self.text.prompt(source.prompt(task)), answer

        def draw(step: int) -> list[tuple[list[int], list[int]]]:
            drawn = (self.tasks.draw("warm-start", step * batch + n) for n in range(batch))
            return [pair(task) for task in drawn]

        def check() -> float:
            episodes = self.play(validation, max(CURVE))
            self.model.train()
            return fmean(episode.solved for episode in episodes)

        self.model.train()
        progress = warm_start(
            self.model,
            self.config.warm_start,
            draw=draw,
            check=check,
            report=lambda _: None,
            stopping=lambda: False,
        )
        return progress.step

    def curve(self) -> dict[str, float]:
        """The accuracy on the test set by thinking budget."""
        problems = self.tasks.heldout()[PROBLEMS:]
        return {
            str(budget): fmean(episode.solved for episode in self.play(problems, budget))
            for budget in CURVE
        }


def started(config: RunConfig, seed: int, folder: Path) -> Policy:
    """The policy that all arms of a seed start from; its weights are stored once."""
    path = folder / f"start-seed{seed}.safetensors"
    if not path.exists():
        warm = Policy(config, seed)
        warm.warm()
        folder.mkdir(parents=True, exist_ok=True)
        partial_ = path.with_suffix(f".{os.getpid()}")
        save_file({k: v.clone() for k, v in warm.model.state_dict().items()}, partial_)
        partial_.replace(path)
    policy = Policy(config, seed)
    policy.model.load_state_dict(load_file(path))
    return policy


def drawn_tokens(episodes: Sequence[Episode]) -> int:
    """The tokens that the model drew."""
    return sum(int(one.mask_T.sum()) for episode in episodes for one in episode.trajectories)


def area(curve: dict[str, float]) -> float:
    """The area under a curve of accuracy, as a share of the range of budgets."""
    points = [(int(budget), accuracy) for budget, accuracy in curve.items()]
    parts = [(right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(points)]
    return sum(parts) / (points[-1][0] - points[0][0])


class Session:
    """One arm's training with one seed."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.config = run_config(ARMS[name], seed)
        self.policy = started(self.config, seed, folder)
        torch.manual_seed(seed)
        self.masters = MasterWeights(self.policy.model, self.config.train)
        self.version = self.sampled = self.trained = self.measured = 0
        self.budget = ARMS[name][(len(ARMS[name]) - 1) // 2]
        self.decisions: list[dict[str, Any]] = []
        auto = self.config.budget.controller == "auto"
        self._history = BudgetHistory(self.config) if auto else None
        self._drawn = 0

    def step(self) -> float:
        """Samples a step's groups and trains on them; returns the mean reward."""
        size, count = self.config.rollout.group_size, self.config.train.groups_per_step
        tasks = [self.policy.tasks.draw("run", self._drawn + n) for n in range(count)]
        self._drawn += count
        self.policy.engine.version = self.version
        episodes = self.policy.play([task for task in tasks for _ in range(size)], self.budget)
        groups = [
            group_of("w0", "n", task, 1.0, episodes[n * size : (n + 1) * size])
            for n, task in enumerate(tasks)
        ]
        self.policy.model.train()
        train_step(self.masters, groups, self.config, version=self.version)
        tokens = drawn_tokens(episodes)
        self.sampled, self.trained = self.sampled + tokens, self.trained + tokens
        self.version += 1
        return fmean(episode.trajectory.reward for episode in episodes)

    @property
    def spent(self) -> int:
        """Tokens so far: sampled, trained on, and sampled for paired evaluations."""
        return self.sampled + self.trained + self.measured

    def decide(self) -> None:
        """Measures every thinking budget on the controller's problems, and follows its decision."""
        if self._history is None or self.version % EVERY:
            return
        policy: Any = self.policy
        served = ServedPolicy(policy.engine, policy.model, policy.text, policy.tasks)
        policy.model.eval()
        scores = asyncio.run(measure_settings(served, self.config))
        answers = PROBLEMS * self.config.evaluate.samples
        self.measured += round(sum(score.tokens * answers for score in scores))
        event = Evaluated(
            process="evaluator",
            at=0.0,
            version=self.version,
            accuracy=0.0,
            problems=PROBLEMS,
            seconds=0.0,
            settings=scores,
        )
        found = self._history.observe(event)
        assert found is not None
        self.budget = found.after.thinking
        self.decisions.append(msgspec.to_builtins(found))

    def run(self) -> dict[str, Any]:
        """Trains until the tokens are spent; returns the cell."""
        began = time.process_time()
        torch.manual_seed(self.policy.seed)
        start = self.policy.curve()
        rewards: list[float] = []
        while self.spent < TOKENS:
            self.decide()
            rewards.append(round(self.step(), 4))
        end = self.policy.curve()
        return {
            "budget": self.budget,
            "accuracy": end[str(self.budget)],
            "start": start,
            "end": end,
            "area_start": area(start),
            "area_end": area(end),
            "steps": self.version,
            "sampled": self.sampled,
            "trained": self.trained,
            "measured": self.measured,
            "decisions": self.decisions,
            "rewards": rewards,
            "cpu_seconds": round(time.process_time() - began, 1),
        }


def _cell(name: str, seed: int, folder: Path) -> dict[str, Any]:
    return Session(name, seed, folder).run()


def differences(cells: Cells, of: str, over: str) -> list[float] | None:
    """Accuracy of one arm less that of another, by seed; None if a cell is missing."""
    ours, theirs = cells.all(of), cells.all(over)
    if ours is None or theirs is None:
        return None
    return [one["accuracy"] - other["accuracy"] for one, other in zip(ours, theirs, strict=True)]


def measure(options: Options) -> Measured:
    """Measures the cells that are missing, then compares; a missing one makes a key null."""
    torch.set_num_threads(1)  # Small products gain nothing from a second one.
    cells = Cells(Path(options.out) / "controlled")
    for seed in range(options.seed, min(options.seed + options.cases, cells.seeds.stop)):
        for name in ARMS:
            cells.measure(name, seed, partial(_cell, name, seed, cells.folder))
    return compare(cells)


def compare(cells: Cells) -> Measured:
    """Compares the arms over all seeds."""
    arms = {name: cells.all(name) for name in ARMS}
    means = {
        name: mean_and_error([one["accuracy"] for one in found])
        for name, found in arms.items()
        if found is not None
    }
    values: dict[str, float | None] = {
        "auto_vs_best_fixed": None,
        "auto_vs_worst_fixed": None,
        "area_gain": None,
    }
    details: dict[str, Any] = {"accuracy": means, "tokens": TOKENS}
    if all(name in means for name in FIXED):
        ranked = sorted(FIXED, key=lambda name: means[name][0])
        for key, name in (("auto_vs_worst_fixed", ranked[0]), ("auto_vs_best_fixed", ranked[-1])):
            found = differences(cells, "auto", name)
            if found is not None:
                mean, error = mean_and_error(found)
                details[key] = {"over": name, "mean": mean, "error": error, "by_seed": found}
                # In standard errors, of which none counts as more than two points.
                values[key] = mean / min(error, MOST_ERROR) if error else None
    if (grown := arms[AREA_ARM]) is not None:
        gains = [one["area_end"] - one["area_start"] for one in grown]
        mean, error = mean_and_error(gains)
        details["area_gain"] = {"mean": mean, "error": error, "by_seed": gains}
        values["area_gain"] = mean / error if error else None
    details["cells"] = arms
    return Measured(values, details)
