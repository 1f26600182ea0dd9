"""Off-policy corrections for the part that the base of the ratio leaves out: from the sampler to
the policy before the step, caused by staleness or by different arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltawire.config import CorrectionConfig
from deltawire.train.loss.inputs import (
    LARGEST_LOG_RATIO,
    LossInputs,
    log_ratio,
    sequence_means,
    sequence_sums,
)


def correction_weights(inputs: LossInputs, corrections: Sequence[CorrectionConfig]) -> Tensor:
    """Returns the product of all corrections' weights, without a gradient: float[N, C].

    With w = exp(log π_old − log μ) of a token, a correction is a level and an action:

    - ``token``: w itself; ``sequence``: Π w over the sequence; ``geometric``: exp(mean log w).
    - ``truncate``: min(w, high); ``clip``: w within [low, high]; ``mask``: w where it lies in
      [low, high], else 0.

    A correction with ``weigh = false`` is 1 where its weight would be within the bounds, else 0: it
    rejects and leaves the weighting to another. So token and truncate is TIS (Yao et al. 2025),
    token and mask IcePop (Ant Group 2025), sequence and mask masked importance sampling (Liu et al.
    2025), geometric, mask and no weight the rejection of Geo-RS (Li 2025).
    """
    weights = torch.ones_like(inputs.mask_NC)
    if not corrections:
        return weights
    logs = log_ratio(inputs.before, inputs.rollout_NC)
    for correction in corrections:
        weights = weights * _weights(_at_level(logs, inputs, correction), correction)
    return weights


def _at_level(logs_NC: Tensor, inputs: LossInputs, correction: CorrectionConfig) -> Tensor:
    """w of every token at the correction's level: float[N, C]."""
    if correction.level == "token":
        return logs_NC.exp()
    reduce = sequence_means if correction.level == "geometric" else sequence_sums
    logs_S = reduce(logs_NC, inputs.mask_NC, inputs.sequences_N)
    weights_S = logs_S.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    return weights_S[inputs.sequences_N][:, None].expand_as(logs_NC)


def _weights(ratio_NC: Tensor, correction: CorrectionConfig) -> Tensor:
    low, high = correction.low, correction.high
    inside = ((ratio_NC >= low) & (ratio_NC <= high)).to(ratio_NC.dtype)
    if not correction.weigh:
        return inside
    if correction.action == "truncate":
        return ratio_NC.clamp(max=high)
    if correction.action == "clip":
        return ratio_NC.clamp(low, high)
    return ratio_NC * inside
