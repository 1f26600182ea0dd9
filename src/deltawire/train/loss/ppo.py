"""Proximal policy optimization: the ratio, clipped."""

from deltawire.train.loss.inputs import ClipBounds, LossInputs, TokenLosses, clipped_gain


def ppo(inputs: LossInputs, bounds: ClipBounds) -> TokenLosses:
    """−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)·A); with a dual clip c, at most −c·A where A < 0.

    Source: PPO, Schulman et al. 2017, eq. 7; separate bounds as in DAPO, Yu et al. 2025, eq. 8;
    dual clip, Ye et al. 2020, eq. 5 (c > 1; 0 is off).
    """
    return clipped_gain(inputs.ratio, inputs.advantages, bounds)
