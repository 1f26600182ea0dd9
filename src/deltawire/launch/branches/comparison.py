"""Compares held-out results of versions problem by problem, with an error that holds for all tries.

For each problem that both answered, d is the candidate's share of correct answers less the
baseline's. `ArmDifference` bets that their mean is larger, or smaller, than a value; the values
that it cannot reject are the interval. It holds at any time, so a comparison may be repeated as
answers arrive. With ``among`` candidates each gets that share of the error (Bonferroni), which
holds although all are compared with one baseline: the best of a hundred tries is not luck. All
forks of the baseline, and of the run that it is itself a fork of, count as candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError
from deltawire.events import Evaluated
from deltawire.launch.branches.fork_places import direct_forks
from deltawire.live.release.sequential_tests import ArmDifference, log_threshold
from deltawire.runtime.event_tail import EventTail
from deltawire.store import Bucket, open_bucket
from deltawire.store.forked import split_fork
from deltawire.watch.compare import settings_of
from deltawire.wire.run import Run

Array = NDArray[np.float64]

LEAST_PROBLEMS = 2
HIGHEST = 0.999
"""The largest value that is tested: against 1 a bet has no limit."""
_STEPS = 20
"""Halvings of the range in which an end of the interval lies."""


class CandidateVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate against the baseline. ``difference`` is the mean over ``problems``, candidate
    less baseline; ``low`` and ``high`` are the ends of its interval. ``answers_needed`` is about
    how many more answers of each side decide it, None where it is decided or nothing can be
    said."""

    candidate: str
    version: int
    baseline_version: int
    verdict: Literal["better", "worse", "undecided"]
    difference: float
    low: float
    high: float
    problems: int
    answers_needed: int | None = None


Scored = tuple[Run, Evaluated]


def count_tries(baseline: Bucket, candidates: Sequence[str]) -> int:
    """Returns how many candidates count: all forks of the baseline's run and, if that is a fork, of
    its parent; and those of ``candidates``, URLs of runs, that are none of them."""
    known = set(direct_forks(baseline))
    parent, name = split_fork(baseline.url)
    if name:
        known |= set(direct_forks(open_bucket(parent)))
    known.discard(baseline.url)
    return len(known) + sum(one not in known for one in candidates)


def scored_version(bucket: Bucket, run: Run, version: int | None) -> Scored:
    """Returns the evaluation of a version; without one, that of the newest version that was
    evaluated problem by problem. Raises `InputError` if there is none."""
    found = [
        event
        for event in EventTail(bucket, processes=("evaluator",)).read(everything=True)
        if isinstance(event, Evaluated) and event.correct and version in (None, event.version)
    ]
    if not found:
        raise InputError(
            "there is no evaluation by problem"
            + ("" if version is None else f" of version {version}"),
            hint="evaluate.every decides which versions are evaluated",
            run=bucket.url,
        )
    return run, max(found, key=lambda event: (event.version, event.at))


def compare_scores(
    baseline: Scored, candidate: Scored, name: str, *, error: float, among: int
) -> CandidateVerdict:
    """Judges a candidate at the error rate ``error / among``.

    Raises `InputError` if the two were not evaluated on the same problems.
    """
    ours, theirs = settings_of(candidate[0]), settings_of(baseline[0])
    for key in sorted(ours.keys() | theirs.keys()):
        if (key == "seed" or key.startswith("task.")) and ours.get(key) != theirs.get(key):
            raise InputError(
                f"{name} has other held-out problems: {key} differs", hint="compare like with like"
            )
    mine, other = np.array(candidate[1].correct), np.array(baseline[1].correct)
    if len(mine) != len(other):
        raise InputError(f"{name} has other held-out problems: {len(mine)} instead of {len(other)}")
    both = (mine >= 0) & (other >= 0)
    differences = mine[both] - other[both]
    if len(differences) < LEAST_PROBLEMS:
        raise InputError(f"{name} and the baseline have fewer than {LEAST_PROBLEMS} problems both")
    low, high = interval_of(differences, error=error / among)
    verdict: Literal["better", "worse", "undecided"] = "undecided"
    if low > 0 or high < 0:
        verdict = "better" if low > 0 else "worse"
    needed = None
    if verdict == "undecided":
        needed = _needed(differences, error / among, candidate[1].samples)
    return CandidateVerdict(
        candidate=name,
        version=candidate[1].version,
        baseline_version=baseline[1].version,
        verdict=verdict,
        difference=float(differences.mean()),
        low=low,
        high=high,
        problems=len(differences),
        answers_needed=needed,
    )


def interval_of(differences: Array, *, error: float) -> tuple[float, float]:
    """Returns the values of the mean difference that are not rejected, half of the error on each
    side."""
    return -_bound(-differences, error / 2), _bound(differences, error / 2)


def _bound(differences: Array, error: float) -> float:
    """Returns the smallest value that the mean is shown to be below; 1 if there is none."""
    low, high = float(differences.mean()), HIGHEST
    if low >= high or not _below(differences, high, error):
        return 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _below(differences, middle, error) else (middle, high)
    return high


def _below(differences: Array, value: float, error: float) -> bool:
    test = ArmDifference(tolerance=-value, sign=-1)
    test.add(differences)
    return test.log_evidence >= log_threshold(error)


def _needed(differences: Array, error: float, samples: int) -> int | None:
    """Returns about how many more answers decide it, if the difference stays: the wealth of the
    best bet grows by m² / 2v with each difference."""
    mean, variance = float(differences.mean()), float(differences.var())
    if not mean or not variance:
        return None
    problems = 2 * variance * (log_threshold(error / 2) + math.log(12)) / mean**2
    return max(1, math.ceil(problems - len(differences))) * samples


def best_of(verdicts: Sequence[CandidateVerdict]) -> CandidateVerdict | None:
    """Returns the candidate that is better with the largest lower end, None if none is better."""
    better = [one for one in verdicts if one.verdict == "better"]
    return max(better, key=lambda one: one.low, default=None)
