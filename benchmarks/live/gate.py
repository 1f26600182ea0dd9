"""``gate_rollback_equal`` and ``progress_kept``: the evaluation gate over the versions of a run.

Each run has `VERSIONS` versions, which the gate of `deltawire.live.release` compares with the
serving version one after another on `PROBLEMS` held-out problems, whose difficulties differ. The
version that serves is measured again with each candidate (`live.release.measure_again`). The
details have the same without: it keeps the results with which it passed, lucky or not, or those of
one second measurement; and with twice the samples and its first results, which costs as many
answers. A candidate that is rolled back takes the trainer back to the serving version; one that is
held gives way to the next version, which is trained from it. With 1 and with 4 sampled answers to
each problem; the worse counts.

- ``gate_rollback_equal``: the share of versions rolled back where all versions are equal.
- ``progress_kept``: where each version is better than the one that it was trained from by `STEP`
  logits, the progress of the version that serves in the end, over that of all versions.

The details have the same with accuracies only, as results by problem were missing: there both must
fail. And how often a version that is worse by `DROP` is rolled back.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple

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
Serving = Literal["kept", "again", "each"]
"""By what the version that serves is compared: the results with which it passed, those of one
measurement more, or of one more with each candidate."""

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
    serving: Serving = "each",
    runs: int = RUNS,
) -> GatedRuns:
    """Returns what became of ``runs`` runs whose versions improve by ``step`` logits each."""
    rng = np.random.default_rng(seed)
    rolled_back = held = 0
    progress = []
    for _ in range(runs):
        difficulties = rng.normal(0, SPREAD, PROBLEMS)
        served = trained = 0.0
        kept = _measured(rng, difficulties, samples, by_problem)
        for _ in range(VERSIONS):
            trained += step
            score = _measured(rng, difficulties + trained, samples, by_problem)
            if serving == "each":
                kept = _measured(rng, difficulties + served, samples, by_problem)
            found = _gate(score, kept)
            if found.failed:
                rolled_back, trained = rolled_back + 1, served
            elif found.below:
                held += 1
            else:
                served, kept = trained, score
                if serving == "again":
                    kept = _measured(rng, difficulties + served, samples, by_problem)
        progress.append(served)
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


def _gate_rates(
    samples: int, *, seed: int, by_problem: bool = True, serving: Serving = "each"
) -> dict[str, float]:
    about: dict[str, Any] = {"by_problem": by_problem, "serving": serving}
    equal = gated_runs(samples, 0.0, seed=seed, **about)
    better = gated_runs(samples, STEP, seed=seed + 1, **about)
    return {
        "rollback_equal": equal.rolled_back,
        "held_equal": equal.held,
        "progress_kept": better.progress / (STEP * VERSIONS),
        "held_better": better.held,
    }


def measure(options: Options) -> Measured:
    """Measures the keys, and the same by other rules."""
    rates: dict[str, dict[str, float]] = {}
    for samples in SAMPLES:
        seed = options.seed + 10 * samples
        paired = _gate_rates(samples, seed=seed)
        paired["drop_found"] = drop_found(samples, seed=options.seed)
        rates[f"paired, {samples} samples"] = paired
        for serving in ("kept", "again"):
            rates[f"{serving}, {samples} samples"] = _gate_rates(
                samples, seed=seed + 200, serving=serving
            )
        rates[f"kept, {2 * samples} samples"] = _gate_rates(
            2 * samples, seed=seed + 300, serving="kept"
        )
        rates[f"accuracies, {samples} samples"] = _gate_rates(
            samples, seed=seed + 100, by_problem=False, serving="kept"
        )
    paired_rates = [rates[f"paired, {samples} samples"] for samples in SAMPLES]
    values = {
        "gate_rollback_equal": max(one["rollback_equal"] for one in paired_rates),
        "progress_kept": min(one["progress_kept"] for one in paired_rates),
    }
    return Measured(values, {"runs": RUNS, "versions": VERSIONS, "gates": rates})
