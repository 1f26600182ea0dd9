"""One optimizer step: groups in, new weights and what was measured out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltawire.config import RunConfig
from deltawire.parity import Parity, ParityMeter
from deltawire.parity.router_replay import replay_of
from deltawire.train.batch import TokenBatch, collate
from deltawire.train.loss import ADVANTAGES, PolicyLoss, Totals, policy_loss
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import token_logprobs
from deltawire.wire.rollouts import Group


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step measured.

    ``reward_mean`` is over episodes; ``clipped`` and ``rejected`` are shares of the ``tokens``:
    from which the surrogate's bound took gradient, and which a correction left without weight.
    ``kl`` is the mean penalty, 0 without one. ``members`` are the rows that were trained on, in
    parity's order: (place of the group in the step, place of the trajectory in its group).
    """

    loss: float
    grad_norm: float
    reward_mean: float
    tokens: int
    clipped: float
    rejected: float
    kl: float
    parity: Parity
    members: list[tuple[int, int]]


def train_step(
    masters: MasterWeights,
    groups: Sequence[Group],
    config: RunConfig,
    *,
    reference: Any | None = None,
) -> StepResult:
    """One optimizer step on these groups, in this order; the same inputs give the same bits.

    ``reference`` is the model that ``train.loss.kl`` penalises leaving, None without a penalty.
    If parity stops the step, nothing has changed but the gradients.
    """
    size = config.train.micro_batch_groups
    starts = range(0, len(groups), size)
    batches = [collate(groups[start : start + size]) for start in starts]
    totals = totals_of(batches, config)
    meter = ParityMeter(config.parity, masters.steps)
    replay = replay_of(masters.model, config.parity)
    parts = []
    for batch in batches:
        logprobs = token_logprobs(masters.model, batch, replay)
        keep_N = meter.look(
            logprobs, batch.sampler_logprobs_NC, batch.loss_mask_NC, batch.versions_NC
        )
        part = batch_loss(config, batch, logprobs, totals, keep_N=keep_N, reference=reference)
        part.loss.backward()  # type: ignore[no-untyped-call]
        parts.append(part)
    if replay is not None:
        meter.saw_flips(replay.flipped_L, replay.compared_L, damaged=replay.damaged)
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


def totals_of(batches: Sequence[TokenBatch], config: RunConfig) -> Totals:
    """A step's denominators, over all its micro-batches."""
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
    """A micro-batch's part of the loss; ``keep_N`` is 0 for trajectories that are not to count."""
    advantages_E = ADVANTAGES[config.train.loss.advantage](batch.rewards_E, batch.groups_E)
    reference_NC = None
    if reference is not None:
        with torch.no_grad():
            reference_NC = token_logprobs(reference, batch)
    return policy_loss(
        config.train.loss,
        logprobs_NC,
        batch.sampler_logprobs_NC,
        advantages_E[batch.episodes_N],
        batch.loss_mask_NC,
        batch.episodes_N,
        totals,
        keep_N=keep_N,
        reference_NC=reference_NC,
    )
