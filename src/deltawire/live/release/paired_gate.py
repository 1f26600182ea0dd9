"""The evaluation gate: a candidate and the serving version, compared on the same held-out problems.

For each problem, d is the candidate's share of correct answers less the serving version's, in
−1 … 1. Under the null hypothesis, that the mean of E[d] over the set is at least 0, a bettor on
smaller values has an expected wealth of at most 1: Π (1 − λ E[d]) ≤ exp(−λ Σ E[d]) ≤ 1, whatever
the problems' difficulties, as long as their answers are drawn independently. So the wealth reaches
1/α with probability α at most (Ville's inequality; Waudby-Smith and Ramdas 2024).

A set fails a candidate whose accuracy is below the serving version's by more than the margin, if
that is no chance: if the test rejects "not worse". Below by more than the margin, but undecided, it
holds the candidate. Problems differ much more than versions do, and paired differences leave that
out; two accuracies that are compared by the margin fail a third of all equal candidates.

Where results by problem are missing, as in evaluations of earlier releases, accuracies are all
there is: below by more than the margin fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltawire.config.release import ReleaseConfig
from deltawire.live.release.evidence import error_budget
from deltawire.live.release.sequential_tests import ArmDifference, log_threshold

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SetScore:
    """The accuracy of a version on a held-out set, and the share ``correct`` of its answers to each
    problem, -1 where all of them failed; empty where it is not known. ``again`` is that of a later
    measurement, by which it is compared once it serves: what let it pass was partly luck.
    ``awaited`` says that this measurement is still to come.

    Example::

        SetScore(0.5, (1.0, 0.25, 0.25))
    """

    accuracy: float
    correct: tuple[float, ...] = ()
    again: tuple[float, ...] = ()
    awaited: bool = False


Scores = Mapping[int, Mapping[str, SetScore]]
"""Scores of each version by the name of the set."""


@dataclass(frozen=True)
class SetFinding:
    """One set's comparison of ``candidate`` and ``serving``, both accuracies on the same
    ``problems``; 0 problems: of accuracies only. ``log_evidence`` is against "not worse"."""

    name: str
    candidate: float
    serving: float
    margin: float
    problems: int
    log_evidence: float
    log_threshold: float

    @property
    def below(self) -> bool:
        """Returns whether the candidate is below the serving version by more than the margin."""
        return self.candidate < self.serving - self.margin

    @property
    def failed(self) -> bool:
        """Returns whether it is, and not by chance."""
        return self.below and (not self.problems or self.log_evidence >= self.log_threshold)

    @property
    def words(self) -> str:
        """Says what was compared."""
        on = f"on {self.problems} problems" if self.problems else "by accuracies only"
        return (
            f"{self.name} is {self.candidate:.3f}; the serving version has {self.serving:.3f}, "
            f"margin {self.margin:g}, {on}"
        )


def compare_sets(
    release: ReleaseConfig, mine: Mapping[str, SetScore], theirs: Mapping[str, SetScore]
) -> list[SetFinding]:
    """Compares a candidate's scores with the serving version's on every set of the gate, which both
    must have. A gate without sets has no share of the error budget, and nothing to compare."""
    if not release.gate:
        return []
    threshold = log_threshold(error_budget(release).gate)
    return [
        _compared(name, mine[name], theirs[name], margin, threshold)
        for name, margin in sorted(release.gate.items())
    ]


def _compared(
    name: str, mine: SetScore, theirs: SetScore, margin: float, threshold: float
) -> SetFinding:
    one, other = _paired(mine.correct, theirs.again or theirs.correct)
    if not len(one):
        return SetFinding(name, mine.accuracy, theirs.accuracy, margin, 0, 0.0, threshold)
    test = ArmDifference(tolerance=0.0, sign=-1)
    test.add(one - other)
    means = float(one.mean()), float(other.mean())
    return SetFinding(name, *means, margin, len(one), test.log_evidence, threshold)


def _paired(mine: Sequence[float], theirs: Sequence[float]) -> tuple[Array, Array]:
    """Return the results of the problems that both answered. Results are of a set's first problems,
    so the longer one is cut: evaluators of other releases keep another number of them."""
    both = np.array(list(zip(mine, theirs, strict=False)), np.float64).reshape(-1, 2).T
    both = both[:, (both >= 0).all(axis=0)]
    return both[0], both[1]
