"""KTO: each answer is good or bad by itself, and is held against a reference policy."""

import torch

from deltawire.train.loss.inputs import ClipBounds, LossInputs, TokenLosses, sequence_sums


def kto(inputs: LossInputs, _bounds: ClipBounds) -> TokenLosses:
    """|A|·λ·(1 − σ(±β(r − z))) of the whole sequence, at each of its tokens.

    r = Σ log π − log reference over the sequence, and z is ``inputs.reference_point``. A sequence
    with A > 0 is desirable: + and ``desirable_weight``; with A < 0 undesirable: − and
    ``undesirable_weight``; |A| is its weight. `seq_mean_token_mean` then gives the mean over
    sequences, with the exact gradient. Source: Ethayarajh et al. 2024, eq. 8.
    """
    settings = inputs.kto
    assert settings is not None
    assert inputs.reference_NC is not None
    assert inputs.reference_point is not None
    logs_S = sequence_sums(
        inputs.logprobs_NC - inputs.reference_NC, inputs.mask_NC, inputs.sequences_N
    )
    moved_N = settings.beta * (logs_S - inputs.reference_point)[inputs.sequences_N]
    signs_N = inputs.advantages_N.sign()
    weights_N = torch.where(signs_N > 0, settings.desirable_weight, settings.undesirable_weight)
    values_N = torch.sigmoid(signs_N * moved_N)
    losses_N = inputs.advantages_N.abs() * weights_N * (1 - values_N)
    losses_NC = losses_N[:, None].expand_as(inputs.mask_NC)
    return TokenLosses(losses_NC, torch.zeros_like(losses_NC, dtype=torch.bool))
