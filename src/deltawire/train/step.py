"""One optimizer step: groups in, new weights and what was measured out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltawire.config import RunConfig
from deltawire.parity import Parity, ParityMeter
from deltawire.rl.losses import group_advantages, ppo_surrogate, token_mean
from deltawire.train.batch import collate
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import token_logprobs
from deltawire.wire.rollouts import Group


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step measured."""

    loss: float
    grad_norm: float
    reward_mean: float
    tokens: int
    clipped: float
    parity: Parity


def train_step(masters: MasterWeights, groups: list[Group], config: RunConfig) -> StepResult:
    """One optimizer step on these groups, in this order; the same inputs give the same bits.

    If parity stops it, nothing has changed but the gradients.
    """
    batches = [
        collate(groups[start : start + config.train.micro_batch_groups])
        for start in range(0, len(groups), config.train.micro_batch_groups)
    ]
    total = sum(float(batch.loss_mask_NC.sum()) for batch in batches)
    losses, clipped = 0.0, 0.0
    meter = ParityMeter(config.parity, masters.steps)
    for batch in batches:
        logprobs = token_logprobs(masters.model, batch)
        keep_N = meter.look(
            logprobs, batch.sampler_logprobs_NC, batch.loss_mask_NC, batch.versions_NC
        )
        mask_NC = batch.loss_mask_NC * keep_N[:, None]
        surrogate = ppo_surrogate(
            logprobs,
            batch.sampler_logprobs_NC,
            group_advantages(batch.rewards_N, batch.groups_N),
            clip_low=config.train.clip_low,
            clip_high=config.train.clip_high,
        )
        loss = token_mean(surrogate.losses_NC, mask_NC, total=total)
        loss.backward()  # type: ignore[no-untyped-call]
        losses += float(loss.detach())
        clipped += float((surrogate.clipped_NC * mask_NC).sum()) / total
    parity = meter.result()
    rewards = torch.cat([batch.rewards_N for batch in batches])
    return StepResult(
        losses,
        0.0 if parity.stopped else masters.step(),
        float(rewards.mean()),
        int(total),
        clipped,
        parity,
    )
