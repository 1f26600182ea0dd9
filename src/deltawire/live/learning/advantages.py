"""Advantages without groups: one answer a prompt leaves nothing of the same prompt to compare with.

Each way takes answers in order and states a baseline for each that does not depend on the answer
itself, or one of the whole batch:

- `batch_normalized`: (r − mean) / std over the batch. Source: REINFORCE++, Hu 2025, section 3.
- `ValueTracker`: a running value for each task, as in SPO (Xu et al. 2025, section 3.1), whose
  forgetting follows the KL divergence of the policies. The learner does not know that; here
  evidence halves every ``half_life`` versions instead.
- `signs`: no baseline, for a loss that only asks whether an answer was good or bad.
- `LearnedBaseline`: ridge regression on hashed features of the request.

All take weights, which are those of `deltawire.live.learning.influence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

EPSILON = 1e-4
LARGEST = 5.0
"""Advantages are limited to this many standard deviations, so that no answer outweighs a batch."""


class BaselineCase(Protocol):
    """The facts about an answer that baselines use."""

    @property
    def task(self) -> str:
        """The kind of request; empty if unknown."""
        ...

    @property
    def cohort(self) -> str:
        """The group of users."""
        ...

    @property
    def turn(self) -> int:
        """Answers before it in its conversation."""
        ...

    @property
    def length(self) -> int:
        """Tokens of its prompt."""
        ...


def batch_normalized(
    rewards_E: NDArray[np.float64], weights_E: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(r − mean) / (std + ε) with weighted mean and standard deviation, limited to ±`LARGEST`:
    float64[E]. Equal rewards give zeros."""
    total = weights_E.sum()
    if total <= 0:
        return np.zeros_like(rewards_E)
    centred = rewards_E - (weights_E * rewards_E).sum() / total
    std = np.sqrt((weights_E * centred**2).sum() / total)
    return np.asarray(np.clip(centred / (std + EPSILON), -LARGEST, LARGEST), np.float64)


def signs(rewards_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 for a reward above 0, −1 below, and 0: float64[E]. For KTO, which takes good and bad
    answers (`deltawire.train.loss.kto`)."""
    return np.asarray(np.sign(rewards_E), np.float64)


class ValueTracker:
    """The running value of each task, between the bounds of the reward.

    A task starts with ``prior`` answers of value ½. An answer's baseline is the value before it.
    """

    def __init__(
        self,
        low: float,
        high: float,
        *,
        half_life: float = 16.0,
        prior: float = 2.0,
        most: float = 64.0,
    ) -> None:
        self._low, self._span = low, max(high - low, 1e-12)
        self._half_life = half_life
        self._prior = prior
        self._most = most
        self._tasks: dict[str, tuple[float, float, int]] = {}

    def value(self, case: BaselineCase) -> float:
        """Returns the value of an answer's task."""
        good, count, _ = self._tasks.get(case.task, (self._prior / 2, self._prior, 0))
        return self._low + self._span * good / count

    def add(self, case: BaselineCase, reward: float, version: int) -> None:
        """Adds the reward of an answer that ``version`` drew."""
        good, count, newest = self._tasks.get(case.task, (self._prior / 2, self._prior, version))
        kept = 2.0 ** (-max(0, version - newest) / self._half_life)
        kept *= min(1.0, self._most / count)
        share = (reward - self._low) / self._span
        self._tasks[case.task] = (kept * good + share, kept * count + 1, max(version, newest))


class LearnedBaseline:
    """Ridge regression of the reward on features of the request, updated by each answer.

    Features are a constant, the turn, the logarithm of the prompt's length, and task and cohort
    hashed to ``buckets`` indicators each. ``ridge`` is the penalty on all but the constant.
    """

    def __init__(self, *, buckets: int = 32, ridge: float = 4.0) -> None:
        self._buckets = buckets
        size = 3 + 2 * buckets
        self._moments = np.diag([1e-6] + [ridge] * (size - 1))
        self._sums = np.zeros(size)
        self._weights: NDArray[np.float64] | None = None

    def value(self, case: BaselineCase) -> float:
        """Returns the predicted reward of an answer to this request."""
        weights = self._weights
        if weights is None:
            solved = np.linalg.solve(self._moments, self._sums)
            self._weights = weights = np.asarray(solved, np.float64)
        return float(weights @ self.features(case))

    def add(self, case: BaselineCase, reward: float, version: int) -> None:
        """Adds the reward of an answer; ``version`` makes no difference."""
        del version
        x = self.features(case)
        self._moments += np.outer(x, x)
        self._sums += reward * x
        self._weights = None

    def features(self, case: BaselineCase) -> NDArray[np.float64]:
        """Returns the features of a request: float64[3 + 2·buckets]."""
        x = np.zeros(3 + 2 * self._buckets)
        x[:3] = 1.0, min(case.turn, 16) / 4, np.log1p(case.length) / 4
        for place, name in enumerate((case.task, case.cohort)):
            if name:
                number = int.from_bytes(blake3(name.encode()).digest(4), "big") % self._buckets
                x[3 + place * self._buckets + number] = 1.0
        return x


class Baseline(Protocol):
    """A baseline that learns from each answer."""

    def value(self, case: BaselineCase) -> float:
        """Returns the baseline of an answer, from answers added before."""
        ...

    def add(self, case: BaselineCase, reward: float, version: int) -> None:
        """Adds an answer."""
        ...


def advantages(
    baseline: Baseline | None,
    cases: Sequence[BaselineCase],
    rewards_E: NDArray[np.float64],
    weights_E: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Returns the advantages of a batch, float64[E]: what the ``baseline`` leaves of each reward,
    normalized over the batch. Add the batch to it afterwards: no answer is part of its own
    baseline."""
    if baseline is None:
        return batch_normalized(rewards_E, weights_E)
    left_E = rewards_E - np.array([baseline.value(case) for case in cases])
    return batch_normalized(left_E, weights_E)
