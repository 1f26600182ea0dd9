"""Join window: decides when an answer has all the feedback that it will get.

A user who said nothing yet is censored, not negative. The delay model gives the probability that a
report is still to come: a share p of answers is reported about at all, with exponential delays of
rate λ, so of n answers with delays dᵢ, or ages eᵢ and no report,

    L(p, λ) = Π p λ exp(−λ dᵢ) · Π (1 − p + p exp(−λ eᵢ)),

and an answer of age e without a report still gets one with probability
p exp(−λ e) / (1 − p + p exp(−λ e)). Source: Chapelle 2014, sections 3 and 4, without covariates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

State = Literal["waiting", "matured", "silent", "censored"]
"""An answer may still get feedback; has it; gets none any more; or its window ended without a
report while one was still likely, so that nothing is known."""

ITERATIONS = 500
TOLERANCE = 1e-10
MIN_REPORTS = 10
"""With fewer reports nothing is fitted, and silence matures at the end of the window only."""


@dataclass(frozen=True)
class DelayModel:
    """A fit: the share of answers that are reported about, and the mean delay in seconds.

    ``reports`` of ``answers`` were seen, and ``log_likelihood`` is that of the fit.
    """

    share: float
    mean_s: float
    answers: int
    reports: int
    log_likelihood: float

    def still_to_come(self, age_s: float) -> float:
        """Returns the probability that an answer of this age, without a report, still gets one."""
        late = self.share * math.exp(-age_s / self.mean_s)
        return late / (1 - self.share + late) if late else 0.0


def fit_delays(delays_s: Sequence[float], silent_s: Sequence[float]) -> DelayModel | None:
    """Fits the model by expectation maximization: to the delays of answers with a report, and the
    ages of answers without one. Returns None below `MIN_REPORTS` reports."""
    seen, count = len(delays_s), len(delays_s) + len(silent_s)
    if seen < MIN_REPORTS:
        return None
    waited = max(math.fsum(delays_s), 1e-9)
    silent = np.asarray(silent_s, np.float64)
    share, rate = seen / count, seen / waited
    likelihood = before = -math.inf
    for _ in range(ITERATIONS):
        late = share * np.exp(-rate * silent)
        none = 1 - share + late
        expected = np.divide(late, none, out=np.ones_like(late), where=none > 0)
        likelihood = (
            seen * (math.log(share) + math.log(rate))
            - rate * waited
            + float(np.log(np.maximum(none, 1e-300)).sum())
        )
        share = min((seen + float(expected.sum())) / count, 1.0)
        rate = seen / (waited + float(expected @ silent))
        if likelihood - before < TOLERANCE * abs(likelihood):
            break
        before = likelihood
    return DelayModel(share, 1 / rate, count, seen, likelihood)


@dataclass(frozen=True)
class JoinWindow:
    """The rules of one run: feedback is waited for up to ``window_s`` seconds after an answer.

    After a report, ``settle_s`` pass without another one before the answer is matured. Silence is
    silence once the model gives a report less than ``still_likely`` to come.
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
        if model is not None and model.still_to_come(age_s) < self.still_likely:
            return "silent"
        if age_s < self.window_s:
            return "waiting"
        return "censored"
