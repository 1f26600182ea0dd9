"""``compare_trees_kept``: of a hundred trees with a hundred null changes each, the share in which
``compare`` keeps any.

Every version of a tree answers 64 held-out problems four times with the same pass rates, drawn
evenly from .1 to .9. All changes are compared with the tree's one baseline; the change that is
best by its mean is the one that luck would choose, and it is judged among a hundred. The details
have what a difference of two standard errors would keep.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.events import Evaluated
from deltawire.launch.branches.comparison import Scored, compare_scores
from deltawire.wire.run import Run

TREES = 100
CHANGES = 100
PROBLEMS = 64
SAMPLES = 4
RUN = Run(id="ab" * 16, name="r", created_at=0.0, tensors=[], digest="0" * 32)


class Kept(NamedTuple):
    """Trees in which a change was kept: by the comparison, and by two standard errors."""

    by_verdict: int
    by_errors: int


def scored(correct: NDArray[np.float64]) -> Scored:
    """Returns an evaluation with these shares of right answers."""
    return RUN, Evaluated(
        process="evaluator",
        at=1.0,
        version=1,
        accuracy=float(correct.mean()),
        samples=SAMPLES,
        problems=len(correct),
        seconds=1.0,
        correct=correct.tolist(),
    )


def null_trees(seed: int, *, trees: int = TREES) -> Kept:
    """Simulates trees, and counts those in which a null change is kept."""
    rng = np.random.default_rng(seed)
    by_verdict = by_errors = 0
    for _ in range(trees):
        rates = rng.uniform(0.1, 0.9, PROBLEMS)
        baseline = rng.binomial(SAMPLES, rates) / SAMPLES
        changes = [rng.binomial(SAMPLES, rates) / SAMPLES for _ in range(CHANGES)]
        best = max(changes, key=lambda one: float(one.mean()))
        verdict = compare_scores(scored(baseline), scored(best), "c", error=0.05, among=CHANGES)
        by_verdict += verdict.verdict == "better"
        gain = best - baseline
        by_errors += bool(gain.mean() > 2 * gain.std() / PROBLEMS**0.5)
    return Kept(by_verdict, by_errors)


def measure(options: Options) -> Measured:
    """Simulates the trees."""
    kept = null_trees(options.seed)
    return Measured(
        {"compare_trees_kept": kept.by_verdict / TREES},
        {"by_two_standard_errors": kept.by_errors / TREES},
    )
