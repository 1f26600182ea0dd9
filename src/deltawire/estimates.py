"""Estimates that events hold: a version's metric before live users see the version."""

from __future__ import annotations

import msgspec


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
