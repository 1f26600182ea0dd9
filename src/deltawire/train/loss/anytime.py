"""Budget-relative advantages: the area under accuracy over budgets, as a reward for thinking.

Shapes: H thoughts of one prompt, S budgets that rise, A answers with each. A thought of a large
budget is cut at each smaller one and closed, and A answers are drawn after each part. With r[h, s]
the mean reward of the answers with budget s, and P the prior over budgets, Σ P = 1, the reward of a
thought is Σ P[s]·r[h, s], the area. The tokens between two budgets change only what follows, so the
tokens of part s, up to budget s, have the return and the baseline::

    R[h, s] = Σ_(j ≥ s) P[j]·r[h, j]
    V[h, s] = (s/S)·V₁[h, s] + (1 − s/S)·V₂[s],                     s = 0 … S − 1
    V₁[h, s] = Σ_(j < s) λ^(s−j)·r[h, j] / Σ_(j < s) λ^(s−j) · Σ_(j ≥ s) P[j]
    V₂[s] = mean of R[h, s] over the thoughts

V₁ foresees what a thought earns from what it has earned with smaller budgets, V₂ is the group's
mean. The advantage is R − V. An answer is compared with the others after the same part of a
thought; of a single one, with those of the other thoughts with the same budget.

Source: AnytimeReasoner, Qi et al. 2025 (arXiv 2505.13438), budget-relative policy optimization
(BRPO); λ = 0.5 as in their code.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def thought_advantages(rewards_HSA: Floats, prior_S: Floats, discount: float) -> Floats:
    """Returns the advantage of each part of each thought, float64[H, S].

    A thought that lacks an answer (NaN) gets zeros, and is left out of the means.

    Example::

        rewards = np.array([[[0.0], [1.0]], [[0.0], [0.0]]])   # two thoughts, two budgets
        thought_advantages(rewards, np.array([1.0, 1.0]), 0.5)
    """
    complete_H = ~np.isnan(rewards_HSA).any((1, 2))
    found = np.zeros(rewards_HSA.shape[:2])
    if not complete_H.any():
        return found
    reward_HS, prior = rewards_HSA[complete_H].mean(2), prior_S / prior_S.sum()
    budgets = len(prior)
    returned_HS = (reward_HS * prior)[:, ::-1].cumsum(1)[:, ::-1]
    own_HS = np.zeros_like(returned_HS)
    for s in range(1, budgets):
        weights = discount ** np.arange(s, 0, -1)
        own_HS[:, s] = reward_HS[:, :s] @ weights / weights.sum() * prior[s:].sum()
    share = np.arange(budgets) / budgets
    found[complete_H] = returned_HS - (share * own_HS + (1 - share) * returned_HS.mean(0))
    return found


def answer_advantages(rewards_HSA: Floats) -> Floats:
    """Returns the advantage of each answer, float64[H, S, A]; NaN where there is none.

    Example::

        answer_advantages(np.array([[[0.0, 1.0]]]))   # [[[-0.5, 0.5]]]
    """
    axis = 2 if rewards_HSA.shape[2] > 1 else 0
    count = (~np.isnan(rewards_HSA)).sum(axis, keepdims=True)
    mean = np.nansum(rewards_HSA, axis, keepdims=True) / np.maximum(count, 1)
    found: Floats = rewards_HSA - mean
    return found
