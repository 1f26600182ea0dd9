"""From losses a token to one number: a weight for each trajectory's tokens.

Every denominator counts tokens and sequences from before any correction masked some of them:
otherwise what is left would weigh more, the more was rejected.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def token_mean(
    tokens_N: Tensor, sequences_N: Tensor, *, tokens: float, sequences: int, horizon: int
) -> Tensor:
    """1 / all tokens of the step: every token weighs the same. float[N].

    ``tokens_N`` counts each trajectory's unmasked tokens; ``tokens`` and ``sequences`` are the
    whole step's, over all its micro-batches. Source: DAPO, Yu et al. 2025, section 3.3.
    """
    del sequences_N, sequences, horizon
    return torch.ones_like(tokens_N) / tokens


def seq_mean_token_mean(
    tokens_N: Tensor, sequences_N: Tensor, *, tokens: float, sequences: int, horizon: int
) -> Tensor:
    """1 / (sequences · tokens of the sequence): every sequence weighs the same. float[N].

    Arguments as for `token_mean`; a sequence's segments share its count. Source: GRPO, Shao et al.
    2024 (DeepSeekMath), eq. 3.
    """
    del tokens, horizon
    lengths = tokens_N.new_zeros(int(sequences_N.max()) + 1).index_add(0, sequences_N, tokens_N)
    return 1 / (sequences * lengths.clamp(min=1)[sequences_N])


def dr_grpo(
    tokens_N: Tensor, sequences_N: Tensor, *, tokens: float, sequences: int, horizon: int
) -> Tensor:
    """1 / (sequences · ``horizon``), the horizon a constant: a token's weight does not depend on
    how long anything became. float[N].

    Arguments as for `token_mean`. Source: Dr. GRPO, Liu et al. 2025, listing 1.
    """
    del sequences_N, tokens
    return torch.ones_like(tokens_N) / (sequences * horizon)


AGGREGATIONS: dict[str, Callable[..., Tensor]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "dr_grpo": dr_grpo,
}
"""By the names that ``train.loss.aggregation`` takes."""
