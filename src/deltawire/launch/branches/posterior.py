"""The posterior over the version that broke a noisy test, and the version to ask next.

A test passes with one rate before the culprit and with a lower one from the culprit on. Neither is
known: the likelihood is summed over a grid of both. Four further hypotheses say that there is no
single culprit: one rate everywhere, a rate that changes evenly from first to last, two rates that
come and go, and a rate of each version for itself. The next version is the one whose answer is
expected to say most about the hypotheses (mutual information of answer and hypothesis, in nats).

Two rates that come and go are a hidden Markov model over the versions, which begins with the first
rate, ends with the second, and changes three times at least::

    first ─▶ second ─▶ first again ◀─▶ second again
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OTHERS: Array = np.array([0.05, 0.1, 0.2, 0.05])
"""The priors of the hypotheses without a single culprit: one rate, an even change, rates that come
and go, and a rate of each version."""
CHANGES = 8
"""The expected number of changes of rates that come and go, among all versions."""
SCALED_EVERY = 64
"""Versions after which the sums over rates that come and go are scaled. From one version to the
next a sum falls by the chance of a change at most, so it stays far above the least float."""
LEAST_LIKELY = 1e-80
"""The least likelihood of one version's answers, relative to the likelier rate."""
LEAST_DROP = 0.1
"""The smallest difference of pass rates that counts as a break."""
COARSE: Array = np.linspace(0.05, 0.95, 7)
"""The rates of those that come and go, which are summed over at each question."""
RATES: Array = np.concatenate([[0.005], np.arange(0.04, 0.97, 0.04), [0.995]])


@dataclass(frozen=True)
class _Evidence:
    """The posterior of culprits and of the other hypotheses, the expected rates before and from
    each culprit on, and the rates of each version under the others, in their order."""

    culprit_N: Array
    others_H: Array
    before_N: Array
    after_N: Array
    rates_HN: Array


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
        last_C, first_C = np.array(list(itertools.combinations(COARSE, 2))).T
        self._changing = ChangingRates(count, first_C, last_C)
        self._now = self._evidence()

    def add(self, version: int, *, passed: bool) -> None:
        """Adds one answer."""
        (self.passed_N if passed else self.failed_N)[version] += 1
        self._now = self._evidence()

    def weights(self) -> tuple[Array, float]:
        """Returns the posterior: of each version as the culprit (0 for the first), and that there
        is no single one."""
        return self._now.culprit_N, float(self._now.others_H.sum())

    def rates(self) -> tuple[float, float]:
        """Returns the expected pass rates before and from the culprit on."""
        weight_N = self._now.culprit_N / self._now.culprit_N.sum()
        return float(weight_N @ self._now.before_N), float(weight_N @ self._now.after_N)

    def next_version(self) -> int:
        """Returns the version whose answer is expected to say most about the culprit."""
        now, at = self._now, np.arange(len(self.passed_N))
        # pass_HV: the chance that version v passes under each hypothesis.
        pass_HV = np.where(at[:, None] > at[None, :], now.before_N[:, None], now.after_N[:, None])
        pass_HV = np.vstack([pass_HV, now.rates_HN])
        weight_H = np.concatenate([now.culprit_N, now.others_H])
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
        log_N = np.log(sum_N) + top_N + np.log((1 - OTHERS.sum()) / (len(top_N) - 1))
        log_N[0] = -np.inf
        same_R = _log_likelihood(passed_N[-1:], failed_N[-1:])[0]
        slope_P = np.log(self._slope_PN) @ self.passed_N + np.log1p(-self._slope_PN) @ self.failed_N
        own = float(_log_beta(self.passed_N + 1, self.failed_N + 1).sum())
        changing, changing_N = self._changing.evidence(self.passed_N, self.failed_N)
        logs_H = np.array([_log_mean(same_R), _log_mean(slope_P), changing, own]) + np.log(OTHERS)
        weight_H = _share(np.concatenate([log_N, logs_H]))
        same_N = np.full(len(self.passed_N), _share(same_R) @ RATES)
        own_N = (self.passed_N + 1) / (self.passed_N + self.failed_N + 2)
        return _Evidence(
            culprit_N=weight_H[: -len(OTHERS)],
            others_H=weight_H[-len(OTHERS) :],
            before_N=joint_before_NR @ RATES / sum_N,
            after_N=joint_after_NR @ RATES / sum_N,
            rates_HN=np.stack([same_N, _share(slope_P) @ self._slope_PN, changing_N, own_N]),
        )


class ChangingRates:
    """Two rates that come and go over ``count`` versions. ``first_P`` and ``last_P`` are the pairs
    of rates that the likelihood is summed over."""

    def __init__(self, count: int, first_P: Array, last_P: Array) -> None:
        change = min(0.5, CHANGES / count)
        # From one of the four states (columns) to the next version's.
        self._step_SS = np.zeros((4, 4))
        for state, after in enumerate((1, 2, 3, 2)):
            self._step_SS[state, state], self._step_SS[state, after] = 1 - change, change
        self._rates_PS = np.stack([first_P, last_P, first_P, last_P], axis=1)
        nothing_N = np.zeros(count)
        self._prior = 0.0
        self._prior = self.evidence(nothing_N, nothing_N)[0]

    def evidence(self, passed_N: Array, failed_N: Array) -> tuple[float, Array]:
        """Returns the log-likelihood of the answers, and the expected rate of each version."""
        logs_PS, logs_not_PS = np.log(self._rates_PS), np.log1p(-self._rates_PS)
        seen_NPS = passed_N[:, None, None] * logs_PS + failed_N[:, None, None] * logs_not_PS
        top_NP1 = seen_NPS.max(axis=2, keepdims=True)
        # The first and the last version have a state that is given, however unlikely it is.
        seen_NPS = np.maximum(np.exp(seen_NPS - top_NP1), LEAST_LIKELY)
        forward_NPS, backward_NPS = np.empty_like(seen_NPS), np.empty_like(seen_NPS)
        log_P = top_NP1.sum(axis=(0, 2))
        forward_NPS[0] = 0.0
        forward_NPS[0, :, 0] = seen_NPS[0, :, 0]
        for at in range(1, len(seen_NPS)):
            np.matmul(forward_NPS[at - 1], self._step_SS, out=forward_NPS[at])
            forward_NPS[at] *= seen_NPS[at]
            if at % SCALED_EVERY == 0:
                scale_P1 = forward_NPS[at].sum(axis=1, keepdims=True)
                forward_NPS[at] /= scale_P1
                log_P = log_P + np.log(scale_P1[:, 0])
        log_P = log_P + np.log(np.maximum(forward_NPS[-1, :, 3], 1e-300))
        backward_NPS[-1] = np.array([0.0, 0.0, 0.0, 1.0])
        for at in range(len(seen_NPS) - 1, 0, -1):
            np.matmul(backward_NPS[at] * seen_NPS[at], self._step_SS.T, out=backward_NPS[at - 1])
            if at % SCALED_EVERY == 0:
                backward_NPS[at - 1] /= backward_NPS[at - 1].sum(axis=1, keepdims=True)
        held_NPS = forward_NPS * backward_NPS
        held_NPS /= np.maximum(held_NPS.sum(axis=2, keepdims=True), 1e-300)
        rate_NP = (held_NPS * self._rates_PS).sum(axis=2)
        # Three changes take four versions.
        log = _log_mean(log_P) - self._prior if len(passed_N) > 3 else -math.inf
        return log, rate_NP @ _share(log_P)


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
