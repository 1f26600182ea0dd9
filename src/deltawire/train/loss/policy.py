"""The choices put together: one micro-batch's loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltawire.config import LossConfig
from deltawire.errors import InputError
from deltawire.train.loss.aggregation import AGGREGATIONS
from deltawire.train.loss.correction import correction_weights
from deltawire.train.loss.penalty import PENALTIES
from deltawire.train.loss.surrogates import (
    Surrogate,
    cispo,
    dppo,
    gspo,
    importance_sampling,
    ppo,
    reinforce,
)


@dataclass(frozen=True)
class Totals:
    """A whole step's denominators, from before any masking: its unmasked tokens, its sequences,
    and the constant length of ``dr_grpo``."""

    tokens: float
    sequences: int
    horizon: int


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's part of a step's loss: add the parts up.

    ``clipped`` and ``rejected`` are shares of the step's tokens: from which the surrogate's bound
    took gradient, and which a correction gave no weight at all. ``kl`` is the mean penalty before
    its coefficient, each token weighed alike.
    """

    loss: Tensor
    clipped: float
    rejected: float
    kl: float


def policy_loss(
    config: LossConfig,
    logprobs_NC: Tensor,
    rollout_NC: Tensor,
    advantages_N: Tensor,
    mask_NC: Tensor,
    sequences_N: Tensor,
    totals: Totals,
    *,
    keep_N: Tensor | None = None,
    old_NC: Tensor | None = None,
    reference_NC: Tensor | None = None,
) -> PolicyLoss:
    """Σ over tokens of aggregation weight · correction weight · surrogate, and the penalty.

    ``rollout_NC`` are the sampler's log-probabilities; ``old_NC`` those of the policy before this
    step, None where that is the policy being differentiated, as in the only update of a batch.
    ``keep_N`` is 1 for trajectories that count, 0 for ones that something else rejected; they stay
    in the denominators. Raises `InputError` if a penalty is asked for without a reference.
    """
    old = logprobs_NC.detach() if old_NC is None else old_NC
    anchor = old if config.anchor == "old" else rollout_NC
    surrogate = _surrogate(config, logprobs_NC, anchor, advantages_N, mask_NC, sequences_N)
    weights = correction_weights(old, rollout_NC, mask_NC, sequences_N, config.corrections)
    kept = mask_NC if keep_N is None else mask_NC * keep_N[:, None]
    per_token = AGGREGATIONS[config.aggregation](
        mask_NC.sum(1),
        sequences_N,
        tokens=totals.tokens,
        sequences=totals.sequences,
        horizon=totals.horizon,
    )[:, None]
    loss = (surrogate.losses_NC * weights * kept * per_token).sum()
    kl = 0.0
    if config.kl != "none":
        if reference_NC is None:
            raise InputError(f"train.loss.kl = {config.kl} needs a reference's log-probabilities")
        penalty = PENALTIES[config.kl](logprobs_NC, reference_NC)
        loss = loss + config.kl_coefficient * (penalty * kept * per_token).sum()
        kl = float((penalty.detach() * kept).sum()) / totals.tokens
    return PolicyLoss(
        loss,
        clipped=float((surrogate.clipped_NC * kept).sum()) / totals.tokens,
        rejected=float(((weights == 0) * kept).sum()) / totals.tokens,
        kl=kl,
    )


def _surrogate(
    config: LossConfig,
    logprobs_NC: Tensor,
    anchor_NC: Tensor,
    advantages_N: Tensor,
    mask_NC: Tensor,
    sequences_N: Tensor,
) -> Surrogate:
    low, high = config.clip_low, config.clip_high
    match config.surrogate:
        case "ppo":
            return ppo(
                logprobs_NC,
                anchor_NC,
                advantages_N,
                clip_low=low,
                clip_high=high,
                dual_clip=config.dual_clip,
            )
        case "cispo":
            return cispo(logprobs_NC, anchor_NC, advantages_N, clip_low=low, clip_high=high)
        case "gspo":
            return gspo(
                logprobs_NC,
                anchor_NC,
                advantages_N,
                mask_NC,
                sequences_N,
                clip_low=low,
                clip_high=high,
            )
        case "dppo":
            return dppo(logprobs_NC, anchor_NC, advantages_N, clip_low=low, clip_high=high)
        case "importance_sampling":
            return importance_sampling(logprobs_NC, anchor_NC, advantages_N)
        case "reinforce":
            return reinforce(logprobs_NC, advantages_N)
