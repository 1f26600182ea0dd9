"""Importance sampling: the ratio without a bound."""

import torch

from deltawire.train.loss.inputs import ClipBounds, LossInputs, TokenLosses


def importance_sampling(inputs: LossInputs, _bounds: ClipBounds) -> TokenLosses:
    """−ρA, without a bound.

    Source: the per-decision estimator of Precup, Sutton and Singh 2000, without the product over
    earlier tokens, as the field uses it.
    """
    losses = -inputs.ratio * inputs.advantages
    return TokenLosses(losses, torch.zeros_like(losses, dtype=torch.bool))
