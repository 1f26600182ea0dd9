"""Scores, counts and estimates that events hold."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class FamilyCounts(msgspec.Struct, frozen=True, array_like=True):
    """Groups of one family of tasks, trained on and dropped as too old, with their tokens."""

    trained: int = 0
    trained_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0


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
    before the clip (1 in expectation), ``clipped`` the share of answers at the clip, and
    ``clipped_mass`` the share of the version's own answers that the clip leaves out. ``low`` and
    ``high`` are the 95 % interval of the version's mean outcome, whatever those are.

    Example::

        OffPolicyEstimate(answers=3, refused="too few logged answers")
    """

    answers: int
    users: int = 0
    tokens: int = 0
    effective: float = 0.0
    mean_ratio: float = 0.0
    clipped: float = 0.0
    clipped_mass: float = 0.0
    logged: float | None = None
    snips: float | None = None
    snips_error: float | None = None
    doubly_robust: float | None = None
    doubly_robust_error: float | None = None
    low: float | None = None
    high: float | None = None
    refused: str = ""
    seconds: float = 0.0


class SettingScore(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the problems that the controller compares, with one ``thinking`` budget (0: the
    run has none) and one ``scaffold``.

    ``correct`` is the share of correct answers to each problem, in the same order for every
    setting and version; -1 for a problem whose answers all failed. ``tokens`` is the mean number of
    tokens drawn for an answer, ``seconds`` the mean time that its environment took.

    Example::

        SettingScore(thinking=512, scaffold="plain", correct=[1.0, 0.25], tokens=310.5)
    """

    thinking: int
    scaffold: str
    correct: list[Annotated[float, Meta(ge=-1, le=1)]]
    tokens: Annotated[float, Meta(ge=0, le=1e9)]
    seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class BudgetSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The compute that groups and steps are made with: tokens of ``thinking``, ``completions`` of a
    prompt, optimizer ``steps`` of a version, and the ``scaffold``.

    0, or an empty scaffold, stands for what the run is configured with.

    Example::

        BudgetSetting(thinking=512, completions=8, steps=1, scaffold="plain")
    """

    thinking: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    completions: Annotated[int, Meta(ge=0, le=4096)] = 0
    steps: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    scaffold: Annotated[str, Meta(max_length=256)] = ""


class UseGain(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy gained by one ``use`` of tokens, and its standard ``error``.

    ``tokens`` are those that it costs until the next evaluation more than the present setting does
    (fewer: below 0). For ``train``, which goes on with it, and for other ways to train, they are
    all that it costs; these have no gain before they were tried.

    Example::

        UseGain(use="longer thinking", gain=0.02, error=0.01, tokens=12_000.0)
    """

    use: str
    gain: float | None
    error: float | None
    tokens: float
