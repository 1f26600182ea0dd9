"""The posterior over the version that broke a noisy test, and the version to ask next.

A test passes with one rate before the culprit and with a lower one from the culprit on. Neither is
known: the likelihood is summed over a grid of both. Three further hypotheses say that there is no
single culprit: one rate everywhere, a rate that changes evenly from first to last, and a rate of
each version for itself. The next version is the one whose answer is expected to say most about the
hypotheses (mutual information of answer and hypothesis, in nats).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NO_SINGLE = 0.1
"""The prior of the three hypotheses without a single culprit together."""
LEAST_DROP = 0.1
"""The smallest difference of pass rates that counts as a break."""
RATES: Array = np.concatenate([[0.005], np.arange(0.04, 0.97, 0.04), [0.995]])


@dataclass(frozen=True)
class _Evidence:
    """The posterior of culprits and of the three other hypotheses, the expected rates before and
    from each culprit on, and the rates under the other hypotheses."""

    culprit_N: Array
    others_3: Array
    before_N: Array
    after_N: Array
    same: float
    slope_N: Array


class CulpritPosterior:
    """Counts of passed and failed tests of ``count`` versions in order, and what follows of them.

    Version 0 is the last one known to be good, version ``count - 1`` the first known to be bad: the
    culprit is one of 1 … ``count - 1``.

    Example::

        posterior = CulpritPosterior(81)
        posterior.add(posterior.next_version(), passed=False)
    """

    def __init__(self, count: int) -> None:
        self.passed_N = np.zeros(count)
        self.failed_N = np.zeros(count)
        self.may_ask_N = np.ones(count, bool)
        step_N = np.linspace(0, 1, count)
        before_RR, after_RR = np.meshgrid(RATES, RATES, indexing="ij")
        fall_RR = before_RR - after_RR >= LEAST_DROP - 1e-9
        self._fall_RR = fall_RR / fall_RR.sum()
        first_P, last_P = before_RR[fall_RR][::5, None], after_RR[fall_RR][::5, None]
        self._slope_PN = first_P * (1 - step_N) + last_P * step_N
        self._now = self._evidence()

    def add(self, version: int, *, passed: bool) -> None:
        """Adds one answer."""
        (self.passed_N if passed else self.failed_N)[version] += 1
        self._now = self._evidence()

    def weights(self) -> tuple[Array, float]:
        """Returns the posterior: of each version as the culprit (0 for the first), and that there
        is no single one."""
        return self._now.culprit_N, float(self._now.others_3.sum())

    def rates(self) -> tuple[float, float]:
        """Returns the expected pass rates before and from the culprit on."""
        weight_N = self._now.culprit_N / self._now.culprit_N.sum()
        return float(weight_N @ self._now.before_N), float(weight_N @ self._now.after_N)

    def next_version(self) -> int:
        """Returns the version whose answer is expected to say most about the culprit."""
        now, at = self._now, np.arange(len(self.passed_N))
        # pass_HV: the chance that version v passes under each hypothesis.
        pass_HV = np.where(at[:, None] > at[None, :], now.before_N[:, None], now.after_N[:, None])
        own_V = (self.passed_N + 1) / (self.passed_N + self.failed_N + 2)
        pass_HV = np.vstack([pass_HV, np.full(len(at), now.same), now.slope_N, own_V])
        weight_H = np.concatenate([now.culprit_N, now.others_3])
        gain_V = _entropy(weight_H @ pass_HV) - weight_H @ _entropy(pass_HV)
        return int(np.argmax(np.where(self.may_ask_N, gain_V, -1.0)))

    def _evidence(self) -> _Evidence:
        passed_N, failed_N = np.cumsum(self.passed_N), np.cumsum(self.failed_N)
        # For culprit c, versions below c have the first rate and the others the second.
        below_N, failed_below_N = passed_N - self.passed_N, failed_N - self.failed_N
        before_NR = _log_likelihood(below_N, failed_below_N)
        after_NR = _log_likelihood(passed_N[-1] - below_N, failed_N[-1] - failed_below_N)
        top_N = before_NR.max(axis=1) + after_NR.max(axis=1)
        before_NR = np.exp(before_NR - before_NR.max(axis=1, keepdims=True))
        after_NR = np.exp(after_NR - after_NR.max(axis=1, keepdims=True))
        joint_before_NR = before_NR * (after_NR @ self._fall_RR.T)
        joint_after_NR = after_NR * (before_NR @ self._fall_RR)
        sum_N = np.maximum(joint_before_NR.sum(axis=1), 1e-300)
        log_N = np.log(sum_N) + top_N + np.log((1 - NO_SINGLE) / (len(top_N) - 1))
        log_N[0] = -np.inf
        same_R = _log_likelihood(passed_N[-1:], failed_N[-1:])[0]
        slope_P = np.log(self._slope_PN) @ self.passed_N + np.log1p(-self._slope_PN) @ self.failed_N
        own = float(_log_beta(self.passed_N + 1, self.failed_N + 1).sum())
        others_3 = np.array([_log_mean(same_R), _log_mean(slope_P), own]) + np.log(NO_SINGLE / 3)
        weight_H = _share(np.concatenate([log_N, others_3]))
        return _Evidence(
            culprit_N=weight_H[:-3],
            others_3=weight_H[-3:],
            before_N=joint_before_NR @ RATES / sum_N,
            after_N=joint_after_NR @ RATES / sum_N,
            same=float(_share(same_R) @ RATES),
            slope_N=_share(slope_P) @ self._slope_PN,
        )


def _log_likelihood(passed_N: Array, failed_N: Array) -> Array:
    found: Array = passed_N[:, None] * np.log(RATES) + failed_N[:, None] * np.log1p(-RATES)
    return found


def _share(logs: Array) -> Array:
    weights = np.exp(logs - logs.max())
    found: Array = weights / weights.sum()
    return found


def _log_mean(logs: Array) -> float:
    return float(logs.max() + np.log(np.exp(logs - logs.max()).mean()))


def _entropy(chance: Array) -> Array:
    chance = np.clip(chance, 1e-12, 1 - 1e-12)
    found: Array = -chance * np.log(chance) - (1 - chance) * np.log1p(-chance)
    return found


_log_gamma = np.vectorize(math.lgamma, otypes=[np.float64])


def _log_beta(one: Array, other: Array) -> Array:
    found: Array = _log_gamma(one) + _log_gamma(other) - _log_gamma(one + other)
    return found
