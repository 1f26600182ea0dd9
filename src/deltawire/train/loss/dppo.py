"""DPPO: a bound on the difference of probabilities instead of their ratio."""

import torch

from deltawire.train.loss.inputs import ClipBounds, LossInputs, TokenLosses


def dppo(inputs: LossInputs, bounds: ClipBounds) -> TokenLosses:
    """−ρA, without the tokens that have already moved too far in the direction that A pushes:
    π − base, as probabilities, above δ_high where A > 0, below −δ_low elsewhere.

    A difference of probabilities bounds the total variation; a ratio bounds rare tokens tightly
    and likely ones hardly at all. Source: DPPO, Qi et al. 2026, with the binary total variation.
    """
    moved = (inputs.logprobs_NC.exp() - inputs.base_logprobs.exp()).detach()
    far = torch.where(inputs.advantages > 0, moved > bounds.high, moved < -bounds.low)
    return TokenLosses(torch.where(far, 0.0, -inputs.ratio * inputs.advantages), far)
