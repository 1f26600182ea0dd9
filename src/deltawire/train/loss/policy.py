"""Computes the loss of one micro-batch from the configured parts."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from deltawire.config import SURROGATES, LossConfig
from deltawire.errors import InputError
from deltawire.train.loss.aggregation import AGGREGATIONS, Totals
from deltawire.train.loss.correction import correction_weights
from deltawire.train.loss.inputs import ClipBounds, LossInputs, Surrogate
from deltawire.train.loss.penalty import PENALTIES


@dataclass(frozen=True)
class PolicyLoss:
    """The part of a step's loss that one micro-batch contributes; the parts add up.

    ``clipped`` and ``rejected`` are shares of the step's tokens: those whose gradient the
    surrogate's bound reduced, and those to which a correction gave no weight. ``kl`` is the mean
    penalty before its coefficient, with equal weight for each token.
    """

    loss: Tensor
    clipped: float
    rejected: float
    kl: float


@cache
def surrogate_named(name: str) -> Surrogate:
    """The function that `deltawire.config.SURROGATES` registers under ``name``."""
    module, _, function = SURROGATES[name].function.partition(":")
    found: Surrogate = getattr(importlib.import_module(module), function)
    return found


def policy_loss(config: LossConfig, inputs: LossInputs, totals: Totals) -> PolicyLoss:
    """Σ over tokens of aggregation weight · correction weight · surrogate, plus the penalty.

    The base is the one that ``config`` names. Raises `InputError` if a penalty is configured and
    ``inputs`` holds no reference log-probabilities.
    """
    inputs = replace(inputs, ratio_base=config.ratio_base)
    bounds = ClipBounds(*config.clip_bounds, config.dual_clip_bound)
    surrogate = surrogate_named(config.surrogate)(inputs, bounds)
    weights = correction_weights(inputs, config.corrections)
    mask = inputs.mask_NC
    kept = mask if inputs.keep_N is None else mask * inputs.keep_N[:, None]
    per_token = AGGREGATIONS[config.aggregation](inputs, totals)[:, None]
    loss = (surrogate.losses_NC * weights * kept * per_token).sum()
    kl = 0.0
    if config.kl != "none":
        if inputs.reference_NC is None:
            raise InputError(
                f"train.loss.kl = {config.kl} needs the log-probabilities of a reference",
                hint='pass reference_NC, or set train.loss.kl = "none"',
            )
        penalty = PENALTIES[config.kl](inputs.logprobs_NC, inputs.reference_NC)
        loss = loss + config.kl_coefficient * (penalty * kept * per_token).sum()
        kl = float((penalty.detach() * kept).sum()) / totals.tokens
    return PolicyLoss(
        loss,
        clipped=float((surrogate.clipped_NC * kept).sum()) / totals.tokens,
        rejected=float(((weights == 0) * kept).sum()) / totals.tokens,
        kl=kl,
    )
