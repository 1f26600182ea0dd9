"""CISPO: REINFORCE, weighted by a clipped ratio without a gradient."""

from deltawire.train.loss.inputs import ClipBounds, LossInputs, TokenLosses


def cispo(inputs: LossInputs, bounds: ClipBounds) -> TokenLosses:
    """−sg(clip(ρ, 1 − ε_low, 1 + ε_high))·A·log π, where sg stops the gradient.

    A bound shortens a token's gradient and never removes it. ε_low ≥ 1 leaves the lower side free,
    as the paper does; 1 + ε_high = 5 is the default of ScaleRL, Khatri et al. 2025. Source: CISPO,
    MiniMax 2025 (MiniMax-M1).
    """
    ratio = inputs.ratio.detach()
    held = ratio.clamp(max(1 - bounds.low, 0.0), 1 + bounds.high)
    return TokenLosses(-held * inputs.advantages * inputs.logprobs_NC, held != ratio)
