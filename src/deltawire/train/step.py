"""Runs one optimizer step: groups in, new weights and measurements out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltawire.config import RunConfig
from deltawire.parity import BatchParity, ParityMeter
from deltawire.parity.router_replay import replay_of
from deltawire.train.batch import TokenBatch, collate
from deltawire.train.loss import ADVANTAGES, LossInputs, PolicyLoss, Totals, policy_loss
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import token_logprobs
from deltawire.wire.rollouts import Group


@dataclass(frozen=True)
class StepResult:
    """Measurements of one optimizer step.

    ``reward_mean`` is over episodes; ``clipped`` and ``rejected`` are shares of the ``tokens``:
    those whose gradient the surrogate's bound reduced, and those to which a correction gave no
    weight. ``kl`` is the mean penalty, 0 without one. ``members`` are the rows that were trained
    on, in parity's order: (index of the group in the step, index of the trajectory in its group).
    """

    loss: float
    grad_norm: float
    reward_mean: float
    tokens: int
    clipped: float
    rejected: float
    kl: float
    parity: BatchParity
    members: list[tuple[int, int]]


def train_step(
    masters: MasterWeights,
    groups: Sequence[Group],
    config: RunConfig,
    *,
    reference: Any | None = None,
) -> StepResult:
    """Run one optimizer step on these groups, in this order.

    The same inputs and the same number of threads give the same bits. ``reference`` is the frozen
    model of ``train.loss.kl``, None without a penalty. If parity stops the step, only the
    gradients have changed.
    """
    size = config.train.micro_batch_groups
    starts = range(0, len(groups), size)
    device = next(masters.model.parameters()).device
    batches = [collate(groups[start : start + size]).to(device) for start in starts]
    totals = totals_of(batches, config)
    meter = ParityMeter(config.parity, masters.steps)
    replay = replay_of(masters.model, config.parity)
    parts = []
    with deterministic():
        for batch in batches:
            logprobs = token_logprobs(masters.model, batch, replay)
            keep_N = meter.measure(
                logprobs,
                batch.sampler_logprobs_NC,
                batch.loss_mask_NC,
                batch.versions_NC,
                episodes_N=batch.episodes_N,
            )
            part = batch_loss(config, batch, logprobs, totals, keep_N=keep_N, reference=reference)
            part.loss.backward()  # type: ignore[no-untyped-call]
            parts.append(part)
    if replay is not None:
        meter.add_flips(replay.flipped_L, replay.compared_L, damaged=replay.damaged)
    parity = meter.result()
    rewards = torch.cat([batch.rewards_E for batch in batches])
    return StepResult(
        loss=sum(float(part.loss.detach()) for part in parts),
        grad_norm=0.0 if parity.stopped else masters.step(),
        reward_mean=float(rewards.mean()),
        tokens=int(totals.tokens),
        clipped=sum(part.clipped for part in parts),
        rejected=sum(part.rejected for part in parts),
        kl=sum(part.kl for part in parts),
        parity=parity,
        members=[
            (start + group, place)
            for start, batch in zip(starts, batches, strict=True)
            for group, place in batch.members_N
        ],
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch choose algorithms whose sums have a fixed order, where it has a choice.

    Experts scatter and gather tokens by index; with several threads their gradients would add up
    in the order in which threads arrive.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def totals_of(batches: Sequence[TokenBatch], config: RunConfig) -> Totals:
    """The denominators of a step, over all its micro-batches."""
    rollout = config.rollout
    return Totals(
        tokens=sum(float(batch.loss_mask_NC.sum()) for batch in batches),
        sequences=sum(len(batch.rewards_E) for batch in batches),
        horizon=config.train.loss.horizon or rollout.max_tokens * rollout.max_turns,
    )


def batch_loss(
    config: RunConfig,
    batch: TokenBatch,
    logprobs_NC: Tensor,
    totals: Totals,
    *,
    keep_N: Tensor | None = None,
    reference: Any | None = None,
) -> PolicyLoss:
    """One micro-batch's part of the loss; ``keep_N`` is 0 for trajectories that do not count."""
    advantages_E = ADVANTAGES[config.train.loss.advantage](batch.rewards_E, batch.groups_E)
    reference_NC = None
    if reference is not None:
        with torch.no_grad():
            reference_NC = token_logprobs(reference, batch)
    inputs = LossInputs(
        logprobs_NC,
        batch.sampler_logprobs_NC,
        advantages_E[batch.episodes_N],
        batch.loss_mask_NC,
        batch.episodes_N,
        reference_NC=reference_NC,
        keep_N=keep_N,
    )
    return policy_loss(config.train.loss, inputs, totals)
