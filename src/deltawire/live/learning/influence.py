"""Influence: limits how far each user moves a batch's gradient.

The influence of an answer is its weight · |advantage| · tokens, as the loss adds them up: it bounds
the norm of what the answer adds to the gradient, up to the largest gradient of one token. A cap c
means: no user's answers have more than the share c of the influence of the whole batch, after the
cap. Weights are only lowered. If there are too few users for that, nothing is left and the batch
waits for more of them: the bound holds, or nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SLACK = 1e-9


def capped_sums(sums_U: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
    """Returns the largest sums s ≤ ``sums_U`` with sᵤ ≤ cap · Σ s: float64[U]; zeros if only they
    satisfy it.

    With the users in falling order, the first k are cut to cap · T, where T = rest / (1 − k·cap):
    the smallest k for which the next user is below the cut.
    """
    if cap >= 1 or not len(sums_U):
        return sums_U.copy()
    order = np.sort(sums_U)[::-1]
    rest = order.sum()
    for cut, largest in enumerate(order.tolist()):
        left = 1 - cut * cap
        if left <= SLACK:
            break
        total = rest / left
        if largest <= cap * total * (1 + SLACK):
            return np.asarray(np.minimum(sums_U, cap * total), np.float64)
        rest -= largest
    return np.zeros_like(sums_U)


def influence_sizes(
    advantages_E: NDArray[np.float64], tokens_E: NDArray[np.float64], aggregation: str
) -> NDArray[np.float64]:
    """Returns the influence of each answer at weight 1: float64[E].

    ``aggregation`` is that of the loss: where every sequence weighs the same, tokens do not count.
    """
    if aggregation == "seq_mean_token_mean":
        return np.abs(advantages_E)
    return np.asarray(np.abs(advantages_E) * tokens_E, np.float64)


def cap_influence(
    weights_E: NDArray[np.float64],
    sizes_E: NDArray[np.float64],
    users: Sequence[str],
    cap: float,
) -> NDArray[np.float64]:
    """Returns weights with which no user has more than the share ``cap`` of Σ weight · size:
    float64[E]; zeros if there are no others. Answers without a user count as those of one user."""
    user_E = np.unique(list(users), return_inverse=True)[1]
    sums_U = _sums(user_E, weights_E * sizes_E)
    capped_U = capped_sums(sums_U, cap)
    scale_U = np.divide(capped_U, sums_U, out=np.zeros_like(sums_U), where=sums_U > 0)
    if not capped_U.sum() > SLACK * sums_U.sum():  # Else only rounding is left.
        return np.zeros_like(weights_E)
    return np.asarray(np.where(sizes_E > 0, weights_E * scale_U[user_E], weights_E), np.float64)


def _sums(group_E: NDArray[np.intp], weights_E: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.bincount(group_E, weights_E), np.float64)


def age_weights(ages_s: NDArray[np.float64], half_life_s: float) -> NDArray[np.float64]:
    """2^(−age / half-life), 1 without a half-life (0): float64[E]."""
    if not half_life_s:
        return np.ones_like(ages_s)
    return np.asarray(2.0 ** (-np.maximum(ages_s, 0.0) / half_life_s))
