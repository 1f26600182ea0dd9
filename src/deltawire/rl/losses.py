"""The loss as small pure functions, each by its name in the field.

Shapes: G groups, N trajectories, C tokens behind the prompt. Masks are 1 where the model drew the
token. Log-probabilities are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def group_advantages(rewards_N: Tensor, groups_N: Tensor, *, epsilon: float = 1e-4) -> Tensor:
    """(r − mean) / (std + ε) within each group, std over n − 1: float32[N].

    ``groups_N`` numbers each trajectory's group from 0. A group of equal rewards gets zeros.
    Source: GRPO, Shao et al. 2024 (DeepSeekMath), section 4.1.
    """
    rewards = rewards_N.double()  # the mean of equal float32 rewards is then exactly theirs
    count = torch.bincount(groups_N).double()
    mean = torch.zeros_like(count).index_add_(0, groups_N, rewards) / count
    centred = rewards - mean[groups_N]
    variance = torch.zeros_like(count).index_add_(0, groups_N, centred**2) / (count - 1).clamp(
        min=1
    )
    return (centred / (variance.sqrt()[groups_N] + epsilon)).float()


@dataclass(frozen=True)
class Surrogate:
    """Per-token losses, and which tokens the clip silenced."""

    losses_NC: Tensor
    clipped_NC: Tensor


def ppo_surrogate(
    logprobs_NC: Tensor,
    anchor_NC: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)·A) with ρ = exp(log π − log anchor).

    With the sampler's own log-probabilities as the anchor, ρ corrects for every version between
    the one that drew a token and the one being trained. Source: PPO, Schulman et al. 2017, eq. 7;
    separate bounds as in DAPO, Yu et al. 2025, eq. 8.
    """
    ratio = (logprobs_NC - anchor_NC).exp()
    advantages = advantages_N[:, None]
    free = ratio * advantages
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return Surrogate(-torch.minimum(free, held), held < free)


def token_mean(losses_NC: Tensor, mask_NC: Tensor, *, total: float) -> Tensor:
    """Σ masked losses / ``total``, the number of unmasked tokens in the whole batch: every token
    of a step weighs the same, over all its micro-batches."""
    return (losses_NC * mask_NC).sum() / total
