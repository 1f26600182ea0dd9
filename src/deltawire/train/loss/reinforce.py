"""REINFORCE: the score function."""

import torch

from deltawire.train.loss.inputs import ClipBounds, LossInputs, TokenLosses


def reinforce(inputs: LossInputs, _bounds: ClipBounds) -> TokenLosses:
    """−A·log π: no ratio and no base.

    Source: Williams 1992, section 4. Weighted by a truncated correction it is the loss of
    PipelineRL, Piché et al. 2025.
    """
    losses = -inputs.advantages * inputs.logprobs_NC
    return TokenLosses(losses, torch.zeros_like(losses, dtype=torch.bool))
