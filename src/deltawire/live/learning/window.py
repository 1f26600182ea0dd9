"""Join window: decides when an answer has all the feedback that it will get.

A user who said nothing yet is censored, not negative. Each kind of feedback has its own delays, of
any form: an accept may come after seconds, a rejection after a day. Silence is silence once, of
every kind, no more than the share ``still_likely`` of its reports come later than that.

The shares are estimated without a model of the form. An answer of age A can only have shown delays
d ≤ A, so long delays are seen too rarely among new answers: they are truncated on the right. With
the delays t₁ < t₂ < … of a kind, nᵢ reports at tᵢ, and the Rᵢ reports with d ≤ tᵢ ≤ A, the share of
delays up to t is

    F(t) = Π over tᵢ > t of (1 − nᵢ / Rᵢ),

relative to the delays up to the window's end. Source: Lynden-Bell 1971; Woodroofe 1985. Until an
answer was watched for a whole window nobody knows how long delays are, and nothing is silent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

State = Literal["waiting", "matured", "silent", "censored"]
"""An answer may still get feedback; has it; gets none any more; or its window ended without a
report while one was still likely, so that nothing is known."""

MIN_REPORTS = 10
"""With fewer reports of all kinds nothing is fitted."""
ERRORS = 1.645
"""The share that comes later is bounded by the estimate and so many standard errors."""


@dataclass(frozen=True)
class DelayModel:
    """By kind of feedback, the seconds after which it is waited for no longer, and the number of
    ``reports`` that say so; ``share`` is that of answers with a report.

    Example::

        model = fit_delays({"accept": [(9.0, 600.0)] * 40}, 50, window_s=600, still_likely=0.05)
        model.wait_s
    """

    waits: Mapping[str, float]
    reports: Mapping[str, int]
    share: float

    @property
    def wait_s(self) -> float:
        """The longest wait of all kinds."""
        return max(self.waits.values())


def share_up_to(
    delays_R: NDArray[np.float64], ages_R: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the delays in order without repetition, float64[T], and the estimated share of
    delays up to each, float64[T]; ``ages_R`` are the ages of the answers, not below the delays."""
    times_T, counts_T = np.unique(delays_R, return_counts=True)
    began_T = np.searchsorted(np.sort(delays_R), times_T, side="right")
    ended_T = np.searchsorted(np.sort(ages_R), times_T, side="left")
    kept_T = 1 - counts_T / np.maximum(began_T - ended_T, counts_T)
    later_T = np.append(np.cumprod(kept_T[:0:-1])[::-1], 1.0)
    return times_T, np.asarray(later_T, np.float64)


def fit_delays(
    reports: Mapping[str, Sequence[tuple[float, float]]],
    answers: int,
    *,
    window_s: float,
    still_likely: float,
) -> DelayModel | None:
    """Fits the delays of each kind: of each report the delay, and the age of its answer.

    A kind with too few reports for the bound is waited for as long as its longest delay. Returns
    None below `MIN_REPORTS` reports, and before the first answer was watched for a whole window.
    """
    within = {
        kind: np.array([(d, a) for d, a in found if d <= window_s], np.float64).reshape(-1, 2)
        for kind, found in reports.items()
    }
    within = {kind: rows for kind, rows in within.items() if len(rows)}
    count = sum(len(rows) for rows in within.values())
    if count < MIN_REPORTS:
        return None
    waits = {}
    for kind, rows in within.items():
        times_T, shares_T = share_up_to(rows[:, 0], np.minimum(rows[:, 1], window_s))
        later_T = 1 - shares_T
        error_T = ERRORS * np.sqrt(later_T * shares_T / len(rows)) + 1 / len(rows)
        enough = np.flatnonzero(later_T + error_T <= still_likely)
        waits[kind] = float(times_T[enough[0]] if len(enough) else times_T[-1])
    numbers = {kind: len(rows) for kind, rows in within.items()}
    return DelayModel(waits, numbers, min(1.0, count / max(answers, 1)))


@dataclass(frozen=True)
class JoinWindow:
    """The rules of one run: feedback is waited for up to ``window_s`` seconds after an answer.

    After a report, ``settle_s`` pass without another one before the answer is matured. Silence is
    silence once no more than the share ``still_likely`` of each kind's reports come later.
    """

    window_s: float
    settle_s: float = 60.0
    still_likely: float = 0.05

    def state(self, age_s: float, last_report_s: float | None, model: DelayModel | None) -> State:
        """Returns the state of an answer of ``age_s`` seconds, whose newest report came when it was
        ``last_report_s`` seconds old; None if there is none."""
        if last_report_s is not None:
            settled = age_s - last_report_s >= self.settle_s or age_s >= self.window_s
            return "matured" if settled else "waiting"
        if model is not None and age_s > model.wait_s:
            return "silent"
        return "waiting" if age_s < self.window_s else "censored"


def sampled(ages_s: Sequence[float], *, window_s: float, most: int) -> list[int]:
    """Returns the places of at most ``most`` answers that are younger than two windows, evenly over
    their ages; empty before one of all was watched for a whole window."""
    if not ages_s or max(ages_s) < window_s:
        return []
    young = [place for place, age_s in enumerate(ages_s) if age_s < 2 * window_s]
    young.sort(key=lambda place: ages_s[place])
    step = max(1, math.ceil(len(young) / most))
    return young[::step]
