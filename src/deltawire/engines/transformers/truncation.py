"""Restricts each row's distribution to its likeliest tokens (truncated sampling).

Only the draw is restricted. The log-probability that is stored with a token is that of the full
softmax at the temperature, which is what a trainer computes, so that the ratio of trainer to
sampler is 1 while both hold the same weights. Under the truncated distribution every kept token is
1/Z times as likely, where Z is the total probability of the kept tokens. Ratios to it would all be
below 1, by the same factor for good and bad tokens of a position, and PPO's lower bound would clip
every token at positions where Z is small.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept_tokens(logprobs_NV: Tensor, top_p_N: Tensor, top_k_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Returns which tokens may be drawn: bool[N, V], at least one of each row.

    In vLLM's order: ``min_p`` keeps tokens of at least that share of the likeliest one's
    probability; ``top_k`` keeps the k likeliest of those (0: all); ``top_p`` keeps the smallest
    number of the likeliest of what is left that make up this share of its probability. Of equally
    likely tokens the one with the smaller id comes first.

    Source: Holtzman et al. 2020 (top-p), Fan et al. 2018 (top-k), Nguyen et al. 2024 (min-p).
    """
    sorted_NV, order_NV = torch.sort(logprobs_NV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logprobs_NV.shape[1], device=logprobs_NV.device)
    # In the sorted order, min-p and top-k keep a prefix, and top-p a prefix of that.
    kept_NV = sorted_NV >= sorted_NV[:, :1] + min_p_N.log()[:, None]
    kept_NV &= (top_k_N <= 0)[:, None] | (rank_V < top_k_N[:, None])
    mass_NV = torch.where(kept_NV, sorted_NV.exp(), 0.0).double()
    before_NV = mass_NV.cumsum(-1) - mass_NV
    share_N = top_p_N.double() * mass_NV.sum(-1)
    kept_NV &= (top_p_N >= 1)[:, None] | (before_NV < share_N[:, None])
    kept_NV[:, 0] = True
    return torch.zeros_like(kept_NV).scatter_(1, order_NV, kept_NV)
