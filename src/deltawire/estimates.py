"""Scores and estimates of a version that events hold."""

from __future__ import annotations

import msgspec


class BudgetScore(msgspec.Struct, frozen=True, kw_only=True):
    """Results on held-out problems with one ``budget`` of thinking tokens.

    ``accuracy`` is the share correct of all answers, ``pass_at`` that of problems of which at least
    one of k answers is correct, by k; ``majority`` that of problems whose most frequent answer is.
    ``tokens`` is the mean number of tokens drawn for an answer, ``tokens_per_correct`` all tokens
    by correct answers, ``forced`` the share of answers whose thinking was closed by force.
    ``families`` is the accuracy by kind of task.
    """

    budget: int
    accuracy: float
    pass_at: dict[str, float]
    majority: float
    tokens: float
    tokens_per_correct: float | None
    forced: float
    families: dict[str, float] = {}


class OffPolicyEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The mean outcome of a version, 0 … 1, estimated from ``answers`` that ``users`` users got
    from other versions and that this one scored (`deltawire.live.release.off_policy`).

    ``logged`` is the mean outcome of those answers; ``snips`` and ``doubly_robust`` estimate the
    version's, each with its standard error. They are None if ``refused`` says why there is no
    estimate. ``effective`` is the effective sample size, ``mean_ratio`` the mean of the ratios
    before the clip (1 in expectation), and ``clipped`` the share of answers at the clip.

    Example::

        OffPolicyEstimate(answers=3, refused="too few logged answers")
    """

    answers: int
    users: int = 0
    tokens: int = 0
    effective: float = 0.0
    mean_ratio: float = 0.0
    clipped: float = 0.0
    logged: float | None = None
    snips: float | None = None
    snips_error: float | None = None
    doubly_robust: float | None = None
    doubly_robust_error: float | None = None
    refused: str = ""
    seconds: float = 0.0
