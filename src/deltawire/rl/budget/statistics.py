"""Statistics: gains in accuracy with their standard errors, paired by problem."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from deltawire.estimates import SettingScore

DISCOUNT = 0.7
"""The factor by which a measurement loses weight with each later evaluation."""

Gain = tuple[float, float]
"""A gain in accuracy, or in accuracy per token, and its standard error."""


def accuracy_of(score: SettingScore) -> float:
    """The mean share of correct answers, over the problems that did not fail."""
    correct = [share for share in score.correct if share >= 0]
    return sum(correct) / len(correct) if correct else 0.0


def paired(before: Sequence[SettingScore], after: Sequence[SettingScore]) -> Gain:
    """The gain from one setting or version to another on the same problems.

    ``before[i]`` and ``after[i]`` belong together, the newest pair last; earlier pairs weigh less,
    by `DISCOUNT`. The standard error is that of the mean over problems, at least that of one
    problem more or less: a gain that is the same on all problems is known no better.
    """
    weights_K = DISCOUNT ** np.arange(len(before))[::-1]
    gains_KP = _correct(after) - _correct(before)
    gains_P = (weights_K[:, None] * gains_KP).sum(0) / weights_K.sum()
    return _mean(gains_P[np.isfinite(gains_P)])


def slope(scores: Sequence[SettingScore], spent: Sequence[float]) -> Gain | None:
    """The gain per token of one setting over versions, after ``spent`` tokens each.

    A least squares line for each problem; the mean of their slopes. None for fewer than two
    versions, or if nothing was spent between them.
    """
    tokens_K = np.array(spent, np.float64)
    tokens_K -= tokens_K.mean() if len(tokens_K) else 0.0
    spread = float((tokens_K**2).sum())
    if len(tokens_K) < 2 or spread <= 0:
        return None
    # In units of the whole range, so that the least error is that of one problem over it.
    span = float(tokens_K.max() - tokens_K.min())
    slopes_P = (tokens_K[:, None] * _correct(scores)).sum(0) / spread * span
    value, error = _mean(slopes_P[np.isfinite(slopes_P)])
    return value / span, error / span


def _correct(scores: Sequence[SettingScore]) -> NDArray[np.float64]:
    """The shares of correct answers, float64[scores, problems]; NaN where all answers failed."""
    correct_KP = np.array([one.correct for one in scores], np.float64)
    correct_KP[correct_KP < 0] = np.nan
    return correct_KP


def _mean(values_P: NDArray[np.float64]) -> Gain:
    count = len(values_P)
    if count < 2:
        return 0.0, 1.0
    error = float(values_P.std(ddof=1)) / sqrt(count)
    return float(values_P.mean()), max(error, 1.0 / count)
