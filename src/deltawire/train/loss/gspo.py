"""GSPO: PPO's bounds on the ratio of whole sequences."""

from deltawire.train.loss.inputs import (
    ClipBounds,
    LossInputs,
    TokenLosses,
    clipped_gain,
    sequence_means,
)


def gspo(inputs: LossInputs, bounds: ClipBounds) -> TokenLosses:
    """−min(sA, clip(s, 1 − ε_low, 1 + ε_high)·A), s = exp(mean of log ρ over the sequence).

    Every token has the value of its sequence and, through sg(s)·π / sg(π), a separate gradient
    log-probability. The paper's bounds, 3e-4 and 4e-4, are the defaults: a mean of log-ratios
    moves far less than one of them. Source: GSPO, Zheng et al. 2025, in the form for tokens,
    GSPO-token.
    """
    logs = inputs.log_ratio
    mean = sequence_means(logs, inputs.mask_NC, inputs.sequences_N).detach()[inputs.sequences_N]
    ratio = (mean[:, None] + inputs.logprobs_NC - inputs.logprobs_NC.detach()).exp()
    return clipped_gain(ratio, inputs.advantages, bounds._replace(dual=0.0))
