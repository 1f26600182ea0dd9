"""Runs the warm start: supervised steps on pairs of prompt and answer, before version 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deltawire.config import WarmStartConfig

Pair = tuple[list[int], list[int]]
"""The tokens of a prompt, and those of its answer including the end."""

_RAMP = 30


@dataclass(frozen=True)
class WarmStartProgress:
    """State of the warm start after ``step`` steps; ``accuracy`` is None between checks."""

    step: int
    loss: float
    accuracy: float | None


def warm_start(
    model: Any,
    config: WarmStartConfig,
    *,
    draw: Callable[[int], Sequence[Pair]],
    check: Callable[[], float],
    report: Callable[[WarmStartProgress], None],
    stopping: Callable[[], bool],
) -> WarmStartProgress:
    """Minimizes the cross-entropy of the answers with AdamW.

    Ends when ``check`` reaches the configured accuracy, after ``max_steps``, or when ``stopping``
    returns True; returns the last state. ``draw(step)`` returns the pairs of a step, and ``report``
    is called after each.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    progress = WarmStartProgress(0, float("nan"), None)
    for step in range(config.max_steps):
        if stopping():
            break
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / _RAMP)
        loss = answer_loss(model, draw(step))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        due = (step + 1) % config.check_every == 0 or step + 1 == config.max_steps
        accuracy = check() if due else None
        progress = WarmStartProgress(step + 1, float(loss.detach()), accuracy)
        report(progress)
        if accuracy is not None and accuracy >= config.stop_at_accuracy:
            break
    return progress


def answer_loss(model: Any, pairs: Sequence[Pair]) -> torch.Tensor:
    """Computes the mean cross-entropy of the answers' tokens, in nats."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.zeros(len(pairs), length, dtype=torch.long)
    labels = torch.full((len(pairs), length), -100)
    mask = torch.zeros(len(pairs), length, dtype=torch.long)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    device = next(model.parameters()).device
    tokens, labels, mask = tokens.to(device), labels.to(device), mask.to(device)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
    )
