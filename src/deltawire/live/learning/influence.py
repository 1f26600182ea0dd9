"""Influence: limits the weight of each user and each cohort in a batch.

A cap c means: no user's answers weigh more than the share c of what the whole batch weighs, after
all caps. Weights are only lowered. If there are too few users for that, nothing is left and the
batch waits for more of them: the bound holds, or nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 200
SLACK = 1e-9
LEAST_REPORTS = 6
"""Users with fewer answers are never outlying."""
COMPARED_REPORTS = 2
LEAST_USERS = 10
"""Users with so many answers are compared with each other, if there are so many users."""


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


def cap_weights(
    weights_E: NDArray[np.float64],
    users: Sequence[str],
    cohorts: Sequence[str],
    *,
    user_cap: float,
    cohort_cap: float,
) -> NDArray[np.float64]:
    """Returns the weights of a batch's answers with both caps held: float64[E].

    Answers without a user count as those of one user, answers without a cohort have no cap on
    cohorts. Both caps are applied in turn until both hold, or zeros are left.
    """
    user_E = np.unique(list(users), return_inverse=True)[1]
    names, cohort_E = np.unique(list(cohorts), return_inverse=True)
    unnamed = np.flatnonzero(names == "")
    weights_E = weights_E.astype(np.float64)
    for _ in range(ROUNDS):
        before = weights_E
        weights_E = _scaled(weights_E, user_E, user_cap, exempt=-1)
        exempt = int(unnamed[0]) if len(unnamed) else -1
        weights_E = _scaled(weights_E, cohort_E, cohort_cap, exempt=exempt)
        if np.allclose(weights_E, before, rtol=1e-12, atol=0):
            break
    if not _holds(weights_E, user_E, user_cap) or not weights_E.sum() > 0:
        return np.zeros_like(weights_E)
    return weights_E


def _scaled(
    weights_E: NDArray[np.float64], group_E: NDArray[np.intp], cap: float, *, exempt: int
) -> NDArray[np.float64]:
    sums_U = _sums(group_E, weights_E)
    if exempt < 0:
        capped_U = capped_sums(sums_U, cap)
    else:  # The exempt answers count in the total, but are not cut.
        capped_U = _capped_others(sums_U, cap, exempt)
    scale_U = np.divide(capped_U, sums_U, out=np.zeros_like(sums_U), where=sums_U > 0)
    return weights_E * scale_U[group_E]


def _capped_others(sums_U: NDArray[np.float64], cap: float, exempt: int) -> NDArray[np.float64]:
    others = np.delete(sums_U, exempt)
    order = np.sort(others)[::-1]
    rest = order.sum() + sums_U[exempt]
    capped = np.zeros_like(others)
    for cut in range(len(order) + 1):
        left = 1 - cut * cap
        largest = order[cut] if cut < len(order) else 0.0
        if left <= SLACK:
            break
        if largest <= cap * rest / left * (1 + SLACK):
            capped = np.minimum(others, cap * rest / left)
            break
        rest -= largest
    return np.insert(capped, exempt, sums_U[exempt])


def _sums(group_E: NDArray[np.intp], weights_E: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.bincount(group_E, weights_E), np.float64)


def _holds(weights_E: NDArray[np.float64], group_E: NDArray[np.intp], cap: float) -> bool:
    sums_U = _sums(group_E, weights_E)
    return bool((sums_U <= cap * sums_U.sum() * (1 + 1e-6)).all())


def outlying_users(
    users: Sequence[str],
    tasks: Sequence[str],
    rewards_E: NDArray[np.float64],
    *,
    limit: float,
) -> set[str]:
    """Returns the users whose rewards differ from everybody's by more than ``limit`` deviations.

    Of each reward the mean of its task is subtracted. With the mean dᵤ of what is left of a user's
    nᵤ answers, and the variance σ² of one answer, z = (dᵤ − median) / √(τ² + σ²/nᵤ). τ² is the
    variance between users, from the median absolute deviation of their means: users differ
    honestly, and a few liars do not change it. Users with fewer than `LEAST_REPORTS` answers, and
    answers without a user, are never outlying.
    """
    if not limit or not len(rewards_E):
        return set()
    task_E = np.unique(list(tasks), return_inverse=True)[1]
    names, user_E = np.unique(list(users), return_inverse=True)
    left_E = rewards_E - (_sums(task_E, rewards_E) / np.bincount(task_E))[task_E]
    counts_U = np.bincount(user_E)
    means_U = _sums(user_E, left_E) / counts_U
    known_U = (counts_U >= COMPARED_REPORTS) & (names != "")
    if known_U.sum() < LEAST_USERS:
        return set()
    within = float(((left_E - means_U[user_E]) ** 2).sum()) / max(1, len(left_E) - len(names))
    middle = float(np.median(means_U[known_U]))
    spread = 1.4826 * float(np.median(np.abs(means_U[known_U] - middle)))
    between = max(0.0, spread**2 - float(np.median(within / counts_U[known_U])))
    deviations_U = np.abs(means_U - middle) / np.sqrt(between + within / counts_U + 1e-12)
    outlying_U = (counts_U >= LEAST_REPORTS) & (names != "") & (deviations_U > limit)
    return {str(name) for name in names[outlying_U]}


def age_weights(ages_s: NDArray[np.float64], half_life_s: float) -> NDArray[np.float64]:
    """2^(−age / half-life), 1 without a half-life (0): float64[E]."""
    if not half_life_s:
        return np.ones_like(ages_s)
    return np.asarray(2.0 ** (-np.maximum(ages_s, 0.0) / half_life_s))


def effective_sample_size(weights_E: NDArray[np.float64]) -> float:
    """(Σw)² / Σw², 0 without weight. Source: Kish 1965."""
    squares = float((weights_E**2).sum())
    return float(weights_E.sum()) ** 2 / squares if squares else 0.0
