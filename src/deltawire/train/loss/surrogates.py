"""Surrogate objectives: losses a token whose gradient is that of the expected return.

ρ = exp(log π − log anchor) is the ratio. The anchor is the sampler's own log-probability (ρ then
covers every version between sampling and training), or that of the policy before this step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are held within ± this: beyond it exp() overflows into gradients that are not
numbers, and every bound in use is long passed."""


@dataclass(frozen=True)
class Surrogate:
    """Losses and, as a bool mask, the tokens from which a bound took the gradient or part of it;
    both [N, C]."""

    losses_NC: Tensor
    clipped_NC: Tensor


def log_ratio(logprobs_NC: Tensor, anchor_NC: Tensor) -> Tensor:
    """log π − log anchor, within ± `LARGEST_LOG_RATIO`."""
    return (logprobs_NC - anchor_NC).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_sums(values_NC: Tensor, mask_NC: Tensor, sequences_N: Tensor) -> Tensor:
    """Σ of the unmasked values of each sequence: [S], S = 1 + the largest number."""
    rows = (values_NC * mask_NC).sum(1)
    sums = rows.new_zeros(int(sequences_N.max()) + 1)
    return sums.index_add(0, sequences_N, rows)


def sequence_means(values_NC: Tensor, mask_NC: Tensor, sequences_N: Tensor) -> Tensor:
    """Mean of the unmasked values of each sequence: [S]; 0 for one without any."""
    counts = sequence_sums(torch.ones_like(mask_NC), mask_NC, sequences_N)
    return sequence_sums(values_NC, mask_NC, sequences_N) / counts.clamp(min=1)


def ppo(
    logprobs_NC: Tensor,
    anchor_NC: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)·A); with a dual clip c, at most −c·A where A < 0.

    Source: PPO, Schulman et al. 2017, eq. 7; separate bounds as in DAPO, Yu et al. 2025, eq. 8;
    dual clip, Ye et al. 2020, eq. 5 (c > 1; 0 is off).
    """
    advantages = advantages_N[:, None]
    ratio = log_ratio(logprobs_NC, anchor_NC).exp()
    return _clipped(ratio, advantages, clip_low, clip_high, dual_clip)


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> Surrogate:
    free = ratio * advantages
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain, clipped = torch.minimum(free, held), held < free
    if dual_clip:
        floor = (dual_clip * advantages).expand_as(gain)
        low = (advantages < 0) & (gain < floor)
        gain, clipped = torch.where(low, floor, gain), clipped | low
    return Surrogate(-gain, clipped)


def cispo(
    logprobs_NC: Tensor,
    anchor_NC: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """−sg(clip(ρ, 1 − ε_low, 1 + ε_high))·A·log π, sg without a gradient.

    A bound shortens a token's gradient and never takes it away. ε_low ≥ 1 leaves the lower side
    free, as the paper does. Source: CISPO, MiniMax 2025 (MiniMax-M1).
    """
    ratio = log_ratio(logprobs_NC, anchor_NC).exp().detach()
    held = ratio.clamp(max(1 - clip_low, 0.0), 1 + clip_high)
    return Surrogate(-held * advantages_N[:, None] * logprobs_NC, held != ratio)


def gspo(
    logprobs_NC: Tensor,
    anchor_NC: Tensor,
    advantages_N: Tensor,
    mask_NC: Tensor,
    sequences_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """−min(sA, clip(s, 1 − ε_low, 1 + ε_high)·A), s = exp(mean of log ρ over the sequence).

    Every token has its sequence's value and, through sg(s)·π / sg(π), a gradient of its own
    log-probability. The paper's bounds are near 3e-4, far below PPO's. Source: GSPO, Zheng et al.
    2025, in its form for tokens, GSPO-token.
    """
    logs = log_ratio(logprobs_NC, anchor_NC)
    mean = sequence_means(logs, mask_NC, sequences_N).detach()[sequences_N]
    ratio = (mean[:, None] + logprobs_NC - logprobs_NC.detach()).exp()
    return _clipped(ratio, advantages_N[:, None], clip_low, clip_high, 0.0)


def dppo(
    logprobs_NC: Tensor,
    anchor_NC: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """−ρA, without the tokens that have already moved too far the way that A pushes: π − anchor,
    as probabilities, above δ_high where A > 0, below −δ_low elsewhere.

    A difference of probabilities bounds the total variation; a ratio bounds rare tokens tightly
    and likely ones hardly at all. Source: DPPO, Qi et al. 2026, with the binary total variation.
    """
    advantages = advantages_N[:, None]
    ratio = log_ratio(logprobs_NC, anchor_NC).exp()
    moved = (logprobs_NC.exp() - anchor_NC.exp()).detach()
    far = torch.where(advantages > 0, moved > clip_high, moved < -clip_low)
    return Surrogate(torch.where(far, 0.0, -ratio * advantages), far)


def importance_sampling(logprobs_NC: Tensor, anchor_NC: Tensor, advantages_N: Tensor) -> Surrogate:
    """−ρA, bounded by nothing.

    Source: the per-decision estimator of Precup, Sutton and Singh 2000, without the product over
    earlier tokens, as the field uses it.
    """
    ratio = log_ratio(logprobs_NC, anchor_NC).exp()
    return Surrogate(-ratio * advantages_N[:, None], torch.zeros_like(ratio, dtype=torch.bool))


def reinforce(logprobs_NC: Tensor, advantages_N: Tensor) -> Surrogate:
    """−A·log π: the score function, with no ratio and no anchor.

    Source: Williams 1992, section 4. Weighed by a truncated correction it is the loss of
    PipelineRL, Piché et al. 2025.
    """
    losses = -advantages_N[:, None] * logprobs_NC
    return Surrogate(losses, torch.zeros_like(losses, dtype=torch.bool))
