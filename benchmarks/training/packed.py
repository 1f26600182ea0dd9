"""``packed_speedup``: padded rows over packed ones, the same loss and gradients.

Rows are padded as peers pad them: completions in the order given, as many as fit the budget of
tokens. ``sorted_speedup`` in the details is against rows sorted by length, which is how models that
cannot be packed are computed here. No prompt is shared, so nothing but padding is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.training.keys import Measured, Options
from benchmarks.training.workload import (
    BUDGET,
    MEDIAN,
    copy_of,
    log_normal,
    make_groups,
    run_config,
    seconds,
    small_model,
)
from deltawire.config import RunConfig
from deltawire.train.batch import TokenBatch, collate
from deltawire.train.budget import Member, divide
from deltawire.train.policy import TrainedPolicy
from deltawire.train.step import advantages_of, batch_loss, totals_of
from deltawire.wire.rollouts import Group

COMPLETIONS = 32
PROMPT = 16


class Pass:
    """The passes of one step over a separate model."""

    def __init__(
        self, model: Any, groups: Sequence[Group], batches: Sequence[TokenBatch], *, packing: bool
    ) -> None:
        self.config: RunConfig = run_config()
        self.policy = TrainedPolicy(copy_of(model), packing=packing)
        self.batches = batches
        self.totals = totals_of(groups, self.config)
        self.advantages = advantages_of(groups, self.config)

    def __call__(self) -> tuple[float, float]:
        """Loss and norm of its gradient."""
        self.policy.model.zero_grad()
        loss = 0.0
        for batch in self.batches:
            with self.policy.terms(batch) as terms:
                part = batch_loss(
                    self.config, batch, terms.logprobs, self.totals, self.advantages
                ).loss
                part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        norms = [p.grad.norm() for p in self.policy.model.parameters() if p.grad is not None]
        return loss, float(torch.stack(norms).norm())


def measure(options: Options) -> Measured:
    """Measures log-normal lengths, and equal ones."""
    model = small_model()
    values: dict[str, bool | float] = {}
    details: dict[str, Any] = {}
    for key, lengths in (
        ("packed_speedup", log_normal(COMPLETIONS, options.seed)),
        ("packed_speedup_equal", [MEDIAN] * COMPLETIONS),
    ):
        found = _compare(model, lengths, options)
        values[key] = round(found["padded"] / found["packed"], 3)
        details[key] = {**found, "sorted_speedup": round(found["sorted"] / found["packed"], 3)}
    return Measured(values, details)


def _compare(model: Any, lengths: Sequence[int], options: Options) -> dict[str, Any]:
    groups = make_groups(lengths, model=model, prompt=PROMPT, shared=False, seed=options.seed)
    packed, in_order = divide(groups, budget=BUDGET)[0], _in_given_order(groups)
    by_length = divide(groups, budget=BUDGET, packed=False)[0]
    passes = {
        name: Pass(
            model, groups, [collate(groups, members) for members in batches], packing=packing
        )
        for name, batches, packing in (
            ("padded", in_order, False),
            ("sorted", by_length, False),
            ("packed", packed, True),
        )
    }
    results = {name: one() for name, one in passes.items()}
    for name in ("padded", "sorted"):
        for ours, theirs in zip(results["packed"], results[name], strict=True):
            if abs(ours - theirs) > 1e-4 * max(1.0, abs(theirs)):
                raise AssertionError(f"packed and {name} differ: {results}")
    spent = seconds(passes, options.repeats)
    return {**spent, "losses": {name: result[0] for name, result in results.items()}}


def _in_given_order(groups: Sequence[Group]) -> list[list[Member]]:
    """Consecutive trajectories, as many as fit the budget once they are padded."""
    batches: list[list[Member]] = []
    widest = 0
    for number, group in enumerate(groups):
        for place, _, trajectory in group.trained():
            width = len(group.prompt_of(trajectory)) + len(trajectory.tokens_T) - 1
            if not batches or max(widest, width) * (len(batches[-1]) + 1) > BUDGET:
                batches.append([])
                widest = 0
            batches[-1].append((number, place))
            widest = max(widest, width)
    return batches
