"""Losses that a run may name as its own, good and bad."""

import torch

from deltawire.train.loss import ClipBounds, LossInputs, TokenLosses, surrogate_named


def like_ppo(inputs: LossInputs, bounds: ClipBounds) -> TokenLosses:
    return surrogate_named("ppo")(inputs, bounds)


def plain(inputs: LossInputs, bounds: ClipBounds) -> torch.Tensor:
    return -inputs.ratio * inputs.advantages


def raises(inputs: LossInputs, bounds: ClipBounds) -> TokenLosses:
    raise ZeroDivisionError("no data")


def scalar(inputs: LossInputs, bounds: ClipBounds) -> torch.Tensor:
    return inputs.logprobs_NC.sum()
