"""Off-policy estimates: the mean outcome of a candidate, from answers that other versions gave.

For logged answers a to requests x, with the candidate π and the logging policy μ, the ratio is

    w = min(π(a | x) / μ(a | x), c),

of whole answers: the product over their tokens. A clip c bounds the variance and biases the
estimate; without one the estimates are consistent. Sources: SNIPS, Swaminathan and Joachims 2015;
the doubly robust estimate (DR), Dudík et al. 2011, equation 2; the effective sample size
(Σ w)² / Σ w², Kong 1992.

The clip leaves out the share 1 − E[w] of the candidate's answers: those that it gives much more
often than μ, and those that μ never gives. Nothing is known of their outcomes but that they are in
0 … 1, so the candidate's mean lies in [E[w r], 1 − E[w (1 − r)]], whatever they are. `bounds`
is that interval, as wide as the clipped share, with the standard errors of both ends (Bottou et al.
2013, "Counterfactual reasoning and learning systems", section 4.4).

A user's answers resemble each other, so standard errors are those of sums over users (the
linearization of a ratio, with users as clusters). They are too small while few answers carry the
weight: below a least effective sample size there is no estimate, only the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError
from deltawire.estimates import OffPolicyEstimate
from deltawire.live.learning.advantages import BaselineCase, LearnedBaseline

Array = NDArray[np.float64]

PARTS = 5
"""An answer's predicted outcome comes from the users of the other parts."""
NORMAL_95 = 1.959964
_LARGEST_LOG = 60.0


@dataclass(frozen=True)
class MeanEstimate:
    """A mean and its standard error.

    Example::

        MeanEstimate(0.6, 0.02).interval
    """

    value: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """The normal 95 % confidence interval."""
        return self.value - NORMAL_95 * self.error, self.value + NORMAL_95 * self.error


def clipped_ratios(log_ratios_N: Array, clip: float) -> Array:
    """Returns w = exp(log ratio), at most ``clip`` where that is above 0: float64[N]."""
    ratios_N = np.exp(np.minimum(log_ratios_N, _LARGEST_LOG))
    return np.asarray(np.minimum(ratios_N, clip) if clip > 0 else ratios_N, np.float64)


def effective_answers(ratios_N: Array) -> float:
    """Returns the effective sample size (Σ w)² / Σ w²; 0 if all weights are."""
    scaled = ratios_N / max(float(ratios_N.max(initial=0.0)), 1e-300)
    squares = float(scaled @ scaled)
    return float(scaled.sum()) ** 2 / squares if squares else 0.0


def self_normalized(ratios_N: Array, outcomes_N: Array, users: Sequence[str]) -> MeanEstimate:
    """Returns SNIPS, Σ w r / Σ w, with the standard error √(Σᵤ (Σ w (r − v))²) / Σ w.

    Raises `InputError` if all ratios are 0.
    """
    total = float(ratios_N.sum())
    if total <= 0:
        raise InputError("the candidate gives no logged answer any probability")
    value = float(ratios_N @ outcomes_N) / total
    return MeanEstimate(value, _error(ratios_N * (outcomes_N - value) / total, users))


def doubly_robust(
    ratios_N: Array,
    outcomes_N: Array,
    users: Sequence[str],
    *,
    logged_N: Array,
    candidate_N: Array,
) -> MeanEstimate:
    """Returns DR, the mean of q̂(x, π) + w (r − q̂(x, a)), and its standard error.

    ``logged_N`` is q̂(x, a), the predicted outcome of the logged answer, and ``candidate_N`` is
    q̂(x, π), that of the candidate's answers; predictions must not come from the answer itself. The
    estimate is right if either the ratios or the predictions are.
    """
    terms_N = candidate_N + ratios_N * (outcomes_N - logged_N)
    value = float(terms_N.mean())
    return MeanEstimate(value, _error((terms_N - value) / len(terms_N), users))


def clipped_mass(ratios_N: Array) -> float:
    """Returns the share of the candidate's answers that clipped ratios leave out, 1 − mean(w), at
    least 0."""
    return max(1.0 - float(ratios_N.mean()), 0.0)


def bounds(ratios_N: Array, outcomes_N: Array, users: Sequence[str]) -> tuple[float, float]:
    """Returns the 95 % interval of the candidate's mean outcome, whatever the outcomes of the
    answers that the clip leaves out: within 0 … 1."""
    found_N, missed_N = ratios_N * outcomes_N, ratios_N * (1 - outcomes_N)
    ends = []
    for sign, terms_N in ((-1.0, found_N), (1.0, missed_N)):
        mean = float(terms_N.mean())
        error = _error((terms_N - mean) / len(terms_N), users)
        end = mean if sign < 0 else 1 - mean
        ends.append(min(max(end + sign * NORMAL_95 * error, 0.0), 1.0))
    return ends[0], ends[1]


def predicted_outcomes(
    cases: Sequence[BaselineCase], outcomes_N: Array, users: Sequence[str]
) -> Array:
    """Returns q̂(x), each request's predicted outcome by a ridge regression on the answers of other
    users: float64[N]. It knows the request only, so q̂(x, a) = q̂(x, π) = q̂(x)."""
    part_N = _clusters(users) % PARTS
    predicted_N = np.zeros(len(cases))
    for part in np.unique(part_N).tolist():
        model = LearnedBaseline()
        for place in np.flatnonzero(part_N != part).tolist():
            model.add(cases[place], float(outcomes_N[place]), 0)
        for place in np.flatnonzero(part_N == part).tolist():
            predicted_N[place] = model.value(cases[place])
    return predicted_N


def figures_of_estimate(found: OffPolicyEstimate | None) -> dict[str, float]:
    """Returns the figures of an estimate that a decision records; none if it was refused."""
    if found is None or found.snips is None:
        return {}
    names = ("snips", "snips_error", "doubly_robust", "doubly_robust_error", "logged", "effective")
    more = ("low", "high", "clipped_mass")
    figures = {f"estimate_{name}": getattr(found, name) for name in (*names, *more)}
    return {name: float(value) for name, value in figures.items() if value is not None}


def _clusters(users: Sequence[str]) -> NDArray[np.intp]:
    """Returns the number of each answer's user; answers without a user have one each."""
    named = [user or f"\0{place}" for place, user in enumerate(users)]
    return np.unique(named, return_inverse=True)[1]


def _error(influences_N: Array, users: Sequence[str]) -> float:
    """Returns the standard error of a sum of centered influences, with users as clusters."""
    sums_U = np.bincount(_clusters(users), weights=influences_N)
    if len(sums_U) < 2:
        return math.inf
    return math.sqrt(float(sums_U @ sums_U) * len(sums_U) / (len(sums_U) - 1))
