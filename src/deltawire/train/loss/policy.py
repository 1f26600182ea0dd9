"""Computes the loss of one micro-batch from the configured parts."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deltawire.config import SURROGATES, LossConfig
from deltawire.config.own_code import load_code
from deltawire.errors import InputError
from deltawire.train.loss.aggregation import AGGREGATIONS, Totals
from deltawire.train.loss.correction import correction_weights
from deltawire.train.loss.inputs import ClipBounds, LossInputs, Surrogate, TokenLosses
from deltawire.train.loss.penalty import PENALTIES


@dataclass(frozen=True)
class PolicyLoss:
    """The part of a step's loss that one micro-batch contributes; the parts add up.

    ``clipped`` and ``rejected`` are shares of the step's tokens: those whose gradient the
    surrogate's bound reduced, and those to which a correction gave no weight. ``kl`` is the mean
    penalty before its coefficient, with equal weight for each token.

    Example::

        part = policy_loss(LossConfig(surrogate="ppo"), inputs, totals)
        part.loss.backward()
    """

    loss: Tensor
    clipped: float
    rejected: float
    kl: float


@cache
def surrogate_named(name: str) -> Surrogate:
    """Returns the function that `deltawire.config.SURROGATES` registers under ``name``, or the one
    that ``module:function`` names.

    Raises `InputError` for a module that this machine does not trust, or without that function.
    """
    if name not in SURROGATES:
        own: Surrogate = load_code("train.loss.surrogate", name)
        return own
    module, _, function = SURROGATES[name].function.partition(":")
    found: Surrogate = getattr(importlib.import_module(module), function)
    return found


def _token_losses(config: LossConfig, inputs: LossInputs) -> TokenLosses:
    """Calls the surrogate; raises `InputError` if a custom one raises or returns something else."""
    bounds = ClipBounds(*config.clip_bounds, config.dual_clip_bound)
    surrogate = surrogate_named(config.surrogate)
    if config.surrogate in SURROGATES:
        return surrogate(inputs, bounds)
    try:
        found: Any = surrogate(inputs, bounds)
    except Exception as error:  # the function can raise anything
        raise InputError(
            f"train.loss.surrogate {config.surrogate} raised {type(error).__name__}: {error}",
            hint="repair the function; the run continues from its last version",
        ) from error
    if isinstance(found, Tensor):
        found = TokenLosses(found, torch.zeros_like(found, dtype=torch.bool))
    shape = inputs.mask_NC.shape
    if not isinstance(found, TokenLosses) or not found.losses_NC.shape == shape == (
        found.clipped_NC.shape
    ):
        raise InputError(
            f"train.loss.surrogate {config.surrogate} did not return one loss a token: "
            f"a tensor {list(shape)}, or TokenLosses of two"
        )
    return found


def policy_loss(config: LossConfig, inputs: LossInputs, totals: Totals) -> PolicyLoss:
    """Σ over tokens of aggregation weight · correction weight · surrogate, plus the penalty, minus
    the entropy bonus.

    The base is the one that ``config`` names. Raises `InputError` if the loss needs a reference's
    log-probabilities, its reference point or entropies that ``inputs`` does not hold, and for a
    custom surrogate that cannot be used.
    """
    inputs = replace(inputs, ratio_base=config.ratio_base, kto=config.kto)
    compared = config.kl != "none" or config.traits.good_or_bad
    if compared and inputs.reference_NC is None:
        key = f"kl = {config.kl}" if config.kl != "none" else f"surrogate = {config.surrogate}"
        raise InputError(
            f"train.loss.{key} needs the log-probabilities of a reference",
            hint="pass reference_NC, or choose a loss without a reference",
        )
    if config.traits.good_or_bad and inputs.reference_point is None:
        raise InputError(
            f"train.loss.surrogate = {config.surrogate} needs the mean distance to the reference",
            hint="pass reference_point, which is that of all sequences of a step",
        )
    surrogate = _token_losses(config, inputs)
    weights = correction_weights(inputs, config.corrections)
    mask = inputs.mask_NC
    kept = mask if inputs.keep_N is None else mask * inputs.keep_N[:, None]
    per_token = AGGREGATIONS[config.aggregation](inputs, totals)[:, None]
    loss = config.policy_coefficient * (surrogate.losses_NC * weights * kept * per_token).sum()
    kl = 0.0
    if config.kl != "none":
        assert inputs.reference_NC is not None
        penalty = PENALTIES[config.kl](inputs.logprobs_NC, inputs.reference_NC)
        loss = loss + config.kl_coefficient * (penalty * kept * per_token).sum()
        kl = float((penalty.detach() * kept).sum()) / totals.tokens
    if config.entropy_coefficient:
        if inputs.entropy_NC is None:
            raise InputError(
                "train.loss.entropy_coefficient needs the entropies of the policy",
                hint="pass entropy_NC, or set train.loss.entropy_coefficient = 0",
            )
        bonus = (inputs.entropy_NC * kept * per_token).sum()
        loss = loss - config.entropy_coefficient * bonus
    return PolicyLoss(
        loss,
        clipped=float((surrogate.clipped_NC * kept).sum()) / totals.tokens,
        rejected=float(((weights == 0) * kept).sum()) / totals.tokens,
        kl=kl,
    )
