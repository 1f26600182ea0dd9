"""Aggregation of token losses into one number: a weight for the tokens of each trajectory.

Every denominator counts tokens and sequences before any correction masked some of them. Otherwise
the tokens that are left would gain weight whenever others are rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltawire.train.loss.inputs import LossInputs


@dataclass(frozen=True)
class Totals:
    """Denominators of a whole step, over all its micro-batches and before any masking: its
    unmasked tokens, its sequences, and the constant length of ``dr_grpo``.

    Example::

        Totals(tokens=float(mask_NC.sum()), sequences=len(advantages_N), horizon=1024)
    """

    tokens: float
    sequences: int
    horizon: int


def token_mean(inputs: LossInputs, totals: Totals) -> Tensor:
    """1 / all tokens of the step: every token weighs the same. float[N].

    Source: DAPO, Yu et al. 2025, section 3.3.
    """
    return torch.ones_like(inputs.mask_NC[:, 0]) / totals.tokens


def seq_mean_token_mean(inputs: LossInputs, totals: Totals) -> Tensor:
    """1 / (sequences · tokens of the sequence): every sequence weighs the same. float[N].

    The segments of a sequence share its count. Source: GRPO, Shao et al. 2024 (DeepSeekMath),
    eq. 3.
    """
    tokens_N, sequences_N = inputs.mask_NC.sum(1), inputs.sequences_N
    lengths = tokens_N.new_zeros(int(sequences_N.max()) + 1).index_add(0, sequences_N, tokens_N)
    return 1 / (totals.sequences * lengths.clamp(min=1)[sequences_N])


def dr_grpo(inputs: LossInputs, totals: Totals) -> Tensor:
    """1 / (sequences · ``horizon``), the horizon a constant: the weight of a token does not depend
    on the length of anything. float[N].

    Source: Dr. GRPO, Liu et al. 2025, listing 1.
    """
    return torch.ones_like(inputs.mask_NC[:, 0]) / (totals.sequences * totals.horizon)


AGGREGATIONS: dict[str, Callable[[LossInputs, Totals], Tensor]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "dr_grpo": dr_grpo,
}
"""The aggregations, by their names in ``train.loss.aggregation``."""
