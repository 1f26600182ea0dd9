"""Estimators of the divergence between the sampler that drew tokens and the trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """Over the unmasked tokens of a batch, in nats: the means of the k1 and k3 estimators of
    KL(sampler ‖ trainer), the largest |Δ log p|, and the largest ratio."""

    k1: float
    k3: float
    largest_gap: float
    ratio_max: float


def divergence(trainer_NC: Tensor, sampler_NC: Tensor, mask_NC: Tensor) -> Divergence:
    """Compare log-probabilities of the tokens that were drawn, float[N, C] each.

    k1 = −log r and k3 = r − 1 − log r with r = trainer / sampler, computed in double precision
    (k3 cancels to about the square of the gap). Source: Schulman, "Approximating KL divergence",
    2020.
    """
    drawn = mask_NC.bool()
    gap = (trainer_NC.detach().double() - sampler_NC.double())[drawn]
    if not gap.numel():
        return Divergence(0.0, 0.0, 0.0, 1.0)
    return Divergence(
        k1=float(-gap.mean()),
        k3=float((torch.expm1(gap) - gap).mean()),
        largest_gap=float(gap.abs().max()),
        ratio_max=float(gap.max().exp()),
    )
