"""``gate_rollback_equal`` and ``progress_kept``: the evaluation gate over the versions of a run.

Each run has `VERSIONS` versions, which the gate of `deltawire.live.release` compares with the
serving version one after another on `PROBLEMS` held-out problems, whose difficulties differ. A
candidate that passes serves, and keeps the results that it was measured with, lucky or not, or with
``again`` those of a second measurement (`live.release.measure_again`, in the details); one
that is rolled back takes the trainer back to the serving version; one that is held gives way to the
next version, which is trained from it. With 1 and with 4 sampled answers to each problem; the worse
counts.

- ``gate_rollback_equal``: the share of versions rolled back where all versions are equal.
- ``progress_kept``: where each version is better than the one that it was trained from by `STEP`
  logits, the progress of the version that serves in the end, over that of all versions.

The details have the same with accuracies only, as results by problem were missing: there both must
fail. And how often a version that is worse by `DROP` is rolled back.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.config.release import ReleaseConfig
from deltawire.live.release.paired_gate import SetFinding, SetScore, compare_sets

RUNS = 400
VERSIONS = 40
PROBLEMS = 200
STEP = 0.03
DROP = 0.1
SPREAD = 1.5
"""Standard deviation of the problems' difficulties, in logits."""
SAMPLES: Final = (1, 4)

Array = NDArray[np.float64]


class GatedRuns(NamedTuple):
    """Shares of the versions that were rolled back and held, and the mean progress of the version
    that serves in the end, in logits."""

    rolled_back: float
    held: float
    progress: float


def _measured(rng: np.random.Generator, logits: Array, samples: int, by_problem: bool) -> SetScore:
    correct = rng.binomial(samples, 1 / (1 + np.exp(-logits))) / samples
    return SetScore(float(correct.mean()), tuple(correct.tolist()) if by_problem else ())


def _gate(mine: SetScore, theirs: SetScore) -> SetFinding:
    release = ReleaseConfig()
    (found,) = compare_sets(release, {"accuracy": mine}, {"accuracy": theirs})
    return found


def gated_runs(
    samples: int,
    step: float,
    *,
    seed: int,
    by_problem: bool = True,
    again: bool = False,
    runs: int = RUNS,
) -> GatedRuns:
    """Returns what became of ``runs`` runs whose versions improve by ``step`` logits each."""
    rng = np.random.default_rng(seed)
    rolled_back = held = 0
    progress = []
    for _ in range(runs):
        difficulties = rng.normal(0, SPREAD, PROBLEMS)
        serving = trained = 0.0
        kept = _measured(rng, difficulties, samples, by_problem)
        for _ in range(VERSIONS):
            trained += step
            score = _measured(rng, difficulties + trained, samples, by_problem)
            found = _gate(score, kept)
            if found.failed:
                rolled_back, trained = rolled_back + 1, serving
            elif found.below:
                held += 1
            else:
                serving, kept = trained, score
                if again:
                    kept = _measured(rng, difficulties + serving, samples, by_problem)
        progress.append(serving)
    versions = runs * VERSIONS
    return GatedRuns(rolled_back / versions, held / versions, math.fsum(progress) / runs)


def drop_found(samples: int, *, seed: int, runs: int = RUNS) -> float:
    """Returns how often the gate rolls back a version whose accuracy is lower by `DROP`."""
    rng = np.random.default_rng(seed)
    found = 0
    for _ in range(runs):
        difficulties = rng.normal(0, SPREAD, PROBLEMS)
        rates = 1 / (1 + np.exp(-difficulties))
        worse = np.clip(rates * (1 - DROP / rates.mean()), 1e-9, 1 - 1e-9)
        score = _measured(rng, np.log(worse / (1 - worse)), samples, True)
        found += _gate(score, _measured(rng, difficulties, samples, True)).failed
    return found / runs


def measure(options: Options) -> Measured:
    """Measures the keys, with results by problem and without."""
    rates: dict[str, Any] = {}
    for place, by_problem in enumerate((True, False)):
        for samples in SAMPLES:
            seed = options.seed + 100 * place + 10 * samples
            equal = gated_runs(samples, 0.0, seed=seed, by_problem=by_problem)
            better = gated_runs(samples, STEP, seed=seed + 1, by_problem=by_problem)
            rates[f"{'paired' if by_problem else 'accuracies'}, {samples} samples"] = {
                "rollback_equal": equal.rolled_back,
                "held_equal": equal.held,
                "progress_kept": better.progress / (STEP * VERSIONS),
                "held_better": better.held,
            }
    for samples in SAMPLES:
        seed = options.seed + 200 + 10 * samples
        equal = gated_runs(samples, 0.0, seed=seed, again=True)
        better = gated_runs(samples, STEP, seed=seed + 1, again=True)
        rates[f"measured again, {samples} samples"] = {
            "rollback_equal": equal.rolled_back,
            "held_equal": equal.held,
            "progress_kept": better.progress / (STEP * VERSIONS),
            "held_better": better.held,
        }
    for samples in SAMPLES:
        rates[f"paired, {samples} samples"]["drop_found"] = drop_found(samples, seed=options.seed)
    paired = [rates[f"paired, {samples} samples"] for samples in SAMPLES]
    values = {
        "gate_rollback_equal": max(one["rollback_equal"] for one in paired),
        "progress_kept": min(one["progress_kept"] for one in paired),
    }
    return Measured(values, {"runs": RUNS, "versions": VERSIONS, "gates": rates})
