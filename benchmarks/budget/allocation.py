"""``allocation_gain``: tokens to a set accuracy, fixed group size over allocated.

The set has as many prompts of pass rate about 0.03 as of 0.5 and of 0.97; supervised steps on such
distributions make the model that every arm starts from. Answers have one token, so accuracy is read
from the model's own distribution, without sampling. Each arm makes optimizer steps at one learning
rate, with the trainer's own `train_step` and the rules of `deltawire.rl.allocation`. The price
counts every completion twice where it is trained on: once sampled, once trained. Pilots, skipped
and deferred ones included, count as sampled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from benchmarks.budget.cells import Cells, mean_and_error
from benchmarks.training.keys import Measured, Options
from deltawire.config import BuildConfig, RunConfig, parse_config
from deltawire.config.allocation import AllocationConfig, BandConfig
from deltawire.rl.allocation.curriculum import is_drawn, weight_of
from deltawire.rl.allocation.knapsack import divide_budget
from deltawire.rl.allocation.posterior import TaskPosterior
from deltawire.rl.allocation.rules import PromptOutcome, decide
from deltawire.train.build import build_model
from deltawire.train.masters import MasterWeights
from deltawire.train.step import train_step
from deltawire.wire.rollouts import Group, Trajectory

RATES: Final = (0.03, 0.5, 0.97)
PROMPTS: Final = 32
"""Prompts of each pass rate."""
ANSWERS: Final = 16
GROUP, STEP = 8, 16
"""Completions of a group with a fixed size, and groups of a step."""
TARGET: Final = 0.70
"""The set accuracy: the middle third solved, and a part of the hard one. It is 0.5 at the start."""
MARKS: Final = (0.60, 0.65, 0.70, 0.75)
"""Further accuracies whose price the details state."""
CELL_S: Final = 240.0
"""Seconds of processor time after which a cell ends; accuracies that it did not reach are null."""
MAX_TOKENS: Final = 200_000

BANDS: Final = [BandConfig(up_to=0.8, weight=1.0), BandConfig(up_to=1.0, weight=0.1)]
ARMS: Final[dict[str, tuple[AllocationConfig, int]]] = {
    "fixed": (AllocationConfig(), 16),
    "refill": (AllocationConfig(policy="refill"), 4),
    "pilot": (AllocationConfig(policy="pilot", pilot=4, largest=8, bands=BANDS), 2),
    "knapsack": (AllocationConfig(policy="knapsack", pilot=4, largest=16, bands=BANDS), 2),
}
"""By name, the rules and the prompts of a step: of 8, 16 and 32 for the fixed size and of 2, 4, 8
and 16 for the others, the cheapest to `TARGET` with seed 100, which is not measured."""
SHOWN: Final = "knapsack"
"""The arm that ``allocation_gain`` is about, named before the measurement."""


def run_config() -> RunConfig:
    """The configuration of every arm's steps."""
    return parse_config(
        {
            "name": "allocation",
            "model": {"path": "none"},
            "rollout": {"group_size": GROUP, "max_tokens": 1, "context": 16},
            "train": {
                "groups_per_step": STEP,
                "optimizer": {"learning_rate": 3e-4},
                "loss": {"advantage": "group_std"},
            },
            "trust": {"rescore_share": 0.0},
        },
        source="benchmark",
    )


class PromptSet:
    """The prompts, their right answers, and a model with the wanted pass rates."""

    def __init__(
        self, seed: int, rates: Sequence[float] = RATES, *, model: Any | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        count = PROMPTS * len(rates)
        self.rates = np.repeat(rates, PROMPTS)
        self.prompts = [[65 + n // 26, 97 + n % 26, 61] for n in range(count)]
        self.right = rng.integers(0, ANSWERS, count)
        sizes = BuildConfig(
            hidden_size=96, layers=2, head_size=24, feed_forward_size=192, context=16
        )
        self.model = build_model(sizes, seed=seed) if model is None else model
        self._tokens = torch.tensor(self.prompts)
        self.start()

    def logits(self) -> torch.Tensor:
        """The model's logits over the answers, float32[prompts, ANSWERS]."""
        logits: torch.Tensor = self.model(self._tokens).logits[:, -1, :]
        return logits.float()

    def start(self) -> None:
        """Trains the model to the wanted distributions."""
        wanted = torch.zeros(len(self.prompts), 264)
        for row, (rate, right) in enumerate(zip(self.rates, self.right, strict=True)):
            wanted[row, 48 : 48 + ANSWERS] = (1 - rate) / (ANSWERS - 1)
            wanted[row, 48 + int(right)] = rate
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0)
        for step in range(600):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 - step / 600)
            loss = -(wanted * functional.log_softmax(self.logits(), -1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    @torch.no_grad()
    def pass_rates(self) -> np.ndarray:
        """The probability of the right answer to each prompt, float64[prompts]."""
        self.model.eval()
        probabilities = functional.softmax(self.logits(), -1).numpy()
        return probabilities[np.arange(len(self.right)), 48 + self.right].astype(np.float64)


class Session:
    """One arm's training with one seed."""

    def __init__(
        self,
        arm: AllocationConfig,
        seed: int,
        *,
        step: int = STEP,
        rates: Sequence[float] = RATES,
    ) -> None:
        torch.manual_seed(seed)
        self.seed, self.step, self._position = seed, step, 0
        self.arm, self.config = arm, run_config()
        self.set = self.prepare(rates)
        self.rng = np.random.default_rng((seed, 1))
        self.posterior = TaskPosterior(arm.discount)
        self.sampled = self.trained = self.version = 0
        self.counts = dict.fromkeys(("prompts", "skipped", "deferred", "equal"), 0)
        self._order: deque[int] = deque()
        self._deferred: list[tuple[int, int, int]] = []
        self._logprobs = np.zeros(0)

    def prepare(self, rates: Sequence[float]) -> PromptSet:
        """Makes the prompts and the model, and what trains it."""
        prompts = PromptSet(self.seed, rates)
        self.masters = MasterWeights(prompts.model, self.config.train)
        return prompts

    def update(self, groups: Sequence[Group]) -> None:
        """Makes one optimizer step."""
        train_step(self.masters, groups, self.config, version=self.version)

    def next_prompt(self) -> tuple[int, int]:
        """The next prompt, and how often it was deferred in a row: due ones first."""
        if self._deferred and self._deferred[0][0] <= self.version:
            _, number, defers = self._deferred.pop(0)
            return number, defers
        while True:
            if not self._order:
                self._order.extend(self.rng.permutation(len(self.set.prompts)).tolist())
            number, self._position = self._order.popleft(), self._position + 1
            rate = self.posterior.mean(str(number), version=self.version)
            if is_drawn(self._position, weight_of(self.arm.bands, rate), seed=self.seed):
                return number, 0

    def complete(self, number: int, count: int) -> list[Trajectory]:
        """Draws completions of a prompt."""
        logprobs = self._logprobs[number]
        shares = np.exp(logprobs) / np.exp(logprobs).sum()
        drawn = self.rng.choice(len(shares), count, p=shares)
        self.sampled += count
        right = 48 + self.set.right[number]
        return [
            Trajectory(
                np.array([token], np.int32),
                np.array([min(0.0, logprobs[token])], np.float32),
                np.array([self.version], np.int32),
                np.ones(1, np.uint8),
                float(token == right),
                "stop",
            )
            for token in drawn
        ]

    def batch(self) -> list[Group]:
        """Samples until a step's prompts are decided."""
        self.set.model.eval()
        with torch.no_grad():
            self._logprobs = functional.log_softmax(self.set.logits(), -1).double().numpy()
        taken: list[Group] = []
        while len(taken) < self.step:
            wave = [self.next_prompt() for _ in range(self.step - len(taken))]
            first = self.arm.first(GROUP)
            found = [self.complete(number, first) for number, _ in wave]
            planned = self._planned(found)
            for place, (number, defers) in enumerate(wave):
                taken += self._finish(number, defers, found[place], planned[place])
        return taken

    def _outcome(self, found: list[Trajectory]) -> PromptOutcome:
        return PromptOutcome.of([t.reward for t in found], success_at=self.arm.success_at)

    def _planned(self, found: list[list[Trajectory]]) -> list[int | None]:
        """Returns how many completions a round of the knapsack gives each prompt in all."""
        if self.arm.policy != "knapsack":
            return [None] * len(found)
        rates = [(1 + sum(t.reward for t in one)) / (2 + len(one)) for one in found]
        spent = [len(one) for one in found]
        budget = GROUP * len(found) - sum(spent)
        more = divide_budget(rates, spent, budget, largest=self.arm.largest)
        return [have + extra for have, extra in zip(spent, more, strict=True)]

    def _finish(
        self, number: int, defers: int, found: list[Trajectory], planned: int | None
    ) -> list[Group]:
        self.counts["prompts"] += 1
        while True:
            decision = decide(self.arm, self._outcome(found), defers=defers, planned=planned)
            if decision.verdict != "fill":
                break
            found = found + self.complete(number, decision.more)
        outcome = self._outcome(found)
        self.posterior.observe(
            str(number),
            successes=outcome.successes,
            failures=outcome.finished - outcome.successes,
            version=self.version,
        )
        if decision.verdict == "defer":
            self.counts["deferred"] += 1
            self._deferred.append((self.version + self.arm.defer_for, number, defers + 1))
        if decision.verdict == "skip":
            self.counts["skipped"] += 1
        if decision.verdict != "train":
            return []
        self.counts["equal"] += not self._outcome(found).spread
        prompt = np.array(self.set.prompts[number], np.int32)
        return [Group("w0", "n", f"prompt {number}", 1.0, prompt, found)]

    def train(self) -> float:
        """Samples a step and trains on it; returns the accuracy after it."""
        groups = self.batch()
        self.set.model.train()
        self.update(groups)
        self.trained += sum(group.tokens for group in groups)
        self.version += 1
        return float(self.set.pass_rates().mean())

    def run(self) -> dict[str, Any]:
        """Trains to the last mark; returns the cell."""
        began = time.process_time()
        curve: list[tuple[int, float]] = []
        start = self.set.pass_rates()
        accuracy = float(start.mean())
        while True:
            curve.append((self.sampled + self.trained, round(accuracy, 5)))
            elapsed = time.process_time() - began
            if accuracy >= MARKS[-1] or curve[-1][0] > MAX_TOKENS or elapsed > CELL_S:
                break
            accuracy = self.train()
        return {
            "start": [round(float(start[self.set.rates == r].mean()), 4) for r in RATES],
            "end": [
                round(float(self.set.pass_rates()[self.set.rates == r].mean()), 4) for r in RATES
            ],
            "tokens": {str(mark): price(curve, mark) for mark in MARKS},
            "steps": self.version,
            "sampled": self.sampled,
            "trained": self.trained,
            "counts": self.counts,
            "cpu_seconds": round(time.process_time() - began, 1),
            "curve": curve[:: max(1, len(curve) // 100)],
        }


def price(curve: list[tuple[int, float]], mark: float) -> int | None:
    """The tokens at which a curve first reaches an accuracy, None if it never does."""
    return next((tokens for tokens, accuracy in curve if accuracy >= mark), None)


def gains(cells: Cells, over: str, mark: float) -> list[float] | None:
    """The ratio of prices of each seed, None if a cell is missing or never gets there."""
    ours, theirs = cells.all(SHOWN), cells.all(over)
    if ours is None or theirs is None:
        return None
    found = []
    for one, other in zip(ours, theirs, strict=True):
        price_ours, price_theirs = one["tokens"][str(mark)], other["tokens"][str(mark)]
        if price_ours is None or price_theirs is None:
            return None
        found.append(price_theirs / price_ours)
    return found


def _cell(arm: AllocationConfig, step: int, seed: int) -> dict[str, Any]:
    return Session(arm, seed, step=step).run()


def measure(options: Options) -> Measured:
    """Measures the cells that are missing, then reads all."""
    torch.set_num_threads(1)  # Small products gain nothing from a second one.
    cells = Cells(Path(options.out) / "allocation")
    for seed in range(options.seed, min(options.seed + options.cases, cells.seeds.stop)):
        for name, (arm, step) in ARMS.items():
            cells.measure(name, seed, partial(_cell, arm, step, seed))
    details: dict[str, Any] = {"target": TARGET, "arms": {}, "gains": {}}
    for name in ARMS:
        stored = [cells.read(name, seed) for seed in cells.seeds]
        details["arms"][name] = stored
        if name == SHOWN:
            continue
        for mark in MARKS:
            found = gains(cells, name, mark)
            shown = None if found is None else mean_and_error(found)
            details["gains"][f"{name} at {mark}"] = shown
    values = {}
    for key, over in (("allocation_gain", "fixed"), ("allocation_gain_over_refill", "refill")):
        found = gains(cells, over, TARGET)
        values[key] = None if found is None else median(found)
    return Measured(values, details)
