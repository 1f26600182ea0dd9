"""``allocation_gain_other``: tokens to an accuracy on sets of prompts for which no arm was tuned.

`benchmarks.budget.allocation` chose its arms on a third of hard, middle and easy prompts. Here the
sets are `SETS`: hard only, easy only, middle only, and one in which the checker is wrong about 5 %
of the answers. The rules and the order of prompts are the same code; the model is an embedding of
the prompts and a shared layer, so that 20 seeds of each arm take minutes, and its steps are of the
trainer's own loss. The price is that of the accuracy that closes `SHARE` of what is missing at the
start; an arm that does not get there pays `MOST`.

The key is the worst set's geometric mean over `SEEDS`: the price of the cheapest arm without
pilots in hindsight, of all fixed sizes and refills of `RIVALS`, over that of the allocated arm.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from benchmarks.budget.allocation import ARMS, PROMPTS, SHOWN, PromptSet, Session
from benchmarks.budget.cells import Cells, mean_and_error
from benchmarks.training.keys import Measured, Options
from deltawire.config.allocation import AllocationConfig
from deltawire.train.loss import LossInputs, Totals, policy_loss
from deltawire.train.step import token_advantages
from deltawire.wire.rollouts import Group, Trajectory

SEEDS: Final = range(20)
SHARE: Final = 0.4
MOST: Final = 60_000
"""Tokens after which an arm ends."""
LEARNING_RATE: Final = 1e-2
SETS: Final[dict[str, tuple[tuple[float, ...], float]]] = {
    "hard": ((0.02, 0.05, 0.1), 0.0),
    "middle": ((0.3, 0.5, 0.7), 0.0),
    "easy": ((0.7, 0.85, 0.95), 0.0),
    "wrong checks": ((0.03, 0.5, 0.97), 0.05),
}
"""By name, the pass rates of a third of the prompts each, and the share of wrong rewards."""
RIVALS: Final = {
    **{f"fixed, {step} prompts": (AllocationConfig(), step) for step in (4, 8, 16)},
    **{f"refill, {step} prompts": (AllocationConfig(policy="refill"), step) for step in (2, 4, 8)},
}
"""Arms without pilots, with their prompts of a step."""
ALLOCATED: Final = {name: ARMS[name] for name in ("pilot", "knapsack")}


class Table(nn.Module):
    """Logits of the next token after a prompt's number: an embedding and a layer that all share."""

    def __init__(self, prompts: int) -> None:
        super().__init__()
        self._of_prompt = nn.Embedding(prompts, 24)
        self._shared = nn.Linear(24, 264)

    def forward(self, ids_NP: torch.Tensor) -> SimpleNamespace:
        """Returns ``logits``, float32[N, 1, 264]."""
        numbers_N = (ids_NP[:, 0] - 65) * 26 + ids_NP[:, 1] - 97
        return SimpleNamespace(logits=self._shared(self._of_prompt(numbers_N))[:, None])


@lru_cache(maxsize=len(SETS))
def _started(seed: int, rates: tuple[float, ...]) -> PromptSet:
    """The prompts and the model that all arms of a seed start from."""
    torch.manual_seed(seed)
    return PromptSet(seed, rates, model=Table(PROMPTS * len(rates)))


class TableSession(Session):
    """One arm's training of a `Table`; a share ``wrong`` of the rewards is flipped."""

    def __init__(
        self,
        arm: AllocationConfig,
        seed: int,
        *,
        step: int,
        rates: Sequence[float],
        wrong: float = 0.0,
    ) -> None:
        self.wrong = wrong
        super().__init__(arm, seed, step=step, rates=rates)

    def prepare(self, rates: Sequence[float]) -> PromptSet:
        """See `Session.prepare`."""
        prompts = copy.deepcopy(_started(self.seed, tuple(rates)))
        self._optimizer = torch.optim.AdamW(
            prompts.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0
        )
        return prompts

    def complete(self, number: int, count: int) -> list[Trajectory]:
        """See `Session.complete`."""
        found = super().complete(number, count)
        if not self.wrong:
            return found
        wrong_N = self.rng.random(count) < self.wrong
        return [
            replace(t, reward=abs(t.reward - float(wrong)))
            for t, wrong in zip(found, wrong_N, strict=True)
        ]

    def update(self, groups: Sequence[Group]) -> None:
        """See `Session.update`."""
        rows = [
            (int(group.task.split()[1]), t, number, place)
            for number, group in enumerate(groups)
            for place, t in enumerate(group.trajectories)
        ]
        advantages, _ = token_advantages(groups, self.config)
        prompts_N = torch.tensor([prompt for prompt, *_ in rows])
        tokens_N1 = torch.tensor([[int(t.tokens_T[0])] for _, t, *_ in rows])
        logprobs_NC = self.set.logits()[prompts_N].log_softmax(-1).gather(1, tokens_N1)
        inputs = LossInputs(
            logprobs_NC,
            torch.tensor([[float(t.logprobs_T[0])] for _, t, *_ in rows]),
            torch.tensor([advantages[number, place] for *_, number, place in rows]),
            torch.ones_like(logprobs_NC).detach(),
            torch.arange(len(rows)),
        )
        totals = Totals(tokens=len(rows), sequences=len(rows), horizon=1)
        self._optimizer.zero_grad()
        policy_loss(self.config.train.loss, inputs, totals).loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def price(self) -> dict[str, Any]:
        """Trains until `SHARE` of what is missing is learned, or `MOST` tokens are spent."""
        start = float(self.set.pass_rates().mean())
        accuracy, target = start, start + SHARE * (1 - start)
        while accuracy < target and self.sampled + self.trained < MOST:
            accuracy = self.train()
        return {
            "tokens": min(self.sampled + self.trained, MOST),
            "reached": accuracy >= target,
            "start": start,
        }


def _cell(name: str, arm: tuple[AllocationConfig, int], seed: int) -> dict[str, Any]:
    rates, wrong = SETS[name]
    return TableSession(arm[0], seed, step=arm[1], rates=rates, wrong=wrong).price()


def compare(cells: Cells, name: str) -> dict[str, Any] | None:
    """Compares the arms on one set; None if a cell is missing."""
    prices: dict[str, list[int]] = {}
    reached = {}
    for arm in RIVALS | ALLOCATED:
        found = cells.all(f"{name}, {arm}")
        if found is None:
            return None
        prices[arm] = [one["tokens"] for one in found]
        reached[arm] = sum(one["reached"] for one in found)
    means = {arm: mean_and_error([log(n) for n in found]) for arm, found in prices.items()}
    cheapest = min(RIVALS, key=lambda arm: means[arm][0])
    gains: dict[str, Any] = {}
    for arm in ALLOCATED:
        pairs = zip(prices[cheapest], prices[arm], strict=True)
        mean, error = mean_and_error([log(theirs / ours) for theirs, ours in pairs])
        gains[arm] = {"gain": exp(mean), "error": error}
    return {
        "cheapest": cheapest,
        "gains": gains,
        "tokens": {arm: exp(mean) for arm, (mean, _) in means.items()},
        "reached": reached,
    }


def measure(options: Options) -> Measured:
    """Measures the cells that are missing, then compares."""
    torch.set_num_threads(1)
    cells = Cells(Path(options.out) / "other-sets", seeds=SEEDS)
    for seed in range(options.seed, min(options.seed + options.cases, SEEDS.stop)):
        for name in SETS:
            for arm, rules in (RIVALS | ALLOCATED).items():
                cells.measure(f"{name}, {arm}", seed, partial(_cell, name, rules, seed))
    details = {name: compare(cells, name) for name in SETS}
    gains = [one["gains"][SHOWN]["gain"] for one in details.values() if one is not None]
    worst = min(gains) if len(gains) == len(SETS) else None
    return Measured({"allocation_gain_other": worst}, details)
