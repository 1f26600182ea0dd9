"""``rejections_as_silence``: the share of rejections that come after their answer was trained on as
silence.

In five worlds accepts and rejections have different delays, in none of them those of a formula that
the learner fits. Users ask for three windows; every `TURN_S` seconds the learner's own code says
which answers are silent. A rejection within the window counts if it comes after that. The same is
measured with one exponential for all kinds, as learners fitted before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.live.learning.window import JoinWindow, fit_delays, sampled

SEEDS = 5
WINDOW_S, TURN_S, ANSWERS = 3600.0, 60.0, 6000
ACCEPTED, REJECTED = 0.3, 0.1
STILL_LIKELY = 0.05
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def _exponential(mean_s: float) -> Draw:
    return lambda rng, count: rng.exponential(mean_s, count)


def _two_times(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Half at once, half when the user comes back after about forty minutes."""
    back = rng.normal(2400, 300, count)
    return np.where(rng.random(count) < 0.5, rng.exponential(20, count), np.maximum(back, 0))


def _log_normal(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return rng.lognormal(np.log(200), 1.5, count)


WORLDS: dict[str, tuple[Draw, Draw]] = {
    "accept 10 s, reject 300 s": (_exponential(10), _exponential(300)),
    "reject first": (_exponential(600), _exponential(5)),
    "two times": (_exponential(10), _two_times),
    "log-normal": (_exponential(30), _log_normal),
    "at the end of a session": (
        _exponential(10), lambda rng, count: rng.uniform(900, 1800, count)
    ),
}  # fmt: skip
"""By name, the delays of accepts and of rejections."""


def one_exponential(delays_s: list[float], ages_s: list[float]) -> float:
    """Returns the age at which a report is less likely than `STILL_LIKELY` by one exponential for
    all kinds (Chapelle 2014), as learners fitted before; infinity below ten reports."""
    seen, count = len(delays_s), len(delays_s) + len(ages_s)
    if seen < 10:
        return np.inf
    silent, waited = np.array(ages_s), sum(delays_s)
    share, rate = seen / count, seen / waited
    for _ in range(200):
        late = share * np.exp(-rate * silent)
        expected = late / (1 - share + late)
        share = min((seen + float(expected.sum())) / count, 1 - 1e-9)
        rate = seen / (waited + float(expected @ silent))
    left = STILL_LIKELY * (1 - share) / ((1 - STILL_LIKELY) * share)
    return float(max(0.0, -np.log(left) / rate))


def lost_rejections(world: str, seed: int, *, by_kind: bool = True) -> tuple[float, float]:
    """Returns the share of rejections within the window that come after their answer was silent,
    and the share of answers without any report that were silent before the window's end."""
    rng = np.random.default_rng((seed, 41))
    at = np.sort(rng.uniform(0, 3 * WINDOW_S, ANSWERS))
    kind = rng.choice(3, ANSWERS, p=[ACCEPTED, REJECTED, 1 - ACCEPTED - REJECTED])
    delay = np.full(ANSWERS, np.inf)
    for number, draw in enumerate(WORLDS[world]):
        delay[kind == number] = draw(rng, int((kind == number).sum()))
    silent_at = np.full(ANSWERS, np.inf)
    window = JoinWindow(WINDOW_S, 60.0, STILL_LIKELY)
    for now in np.arange(TURN_S, 4 * WINDOW_S, TURN_S):
        age, model = now - at, None
        seen = (age > 0) & (delay <= age)
        asked = np.flatnonzero(age > 0)
        if by_kind:
            places = asked[sampled(age[asked].tolist(), window_s=WINDOW_S, most=5000)]
            reports = {
                str(k): [(delay[p], age[p]) for p in places if kind[p] == k and seen[p]]
                for k in range(2)
            }
            model = fit_delays(reports, len(places), window_s=WINDOW_S, still_likely=STILL_LIKELY)
            waits = np.inf if model is None else model.wait_s
        else:
            newest = asked[-5000:]
            told = newest[seen[newest]]
            waits = one_exponential(delay[told].tolist(), age[newest[~seen[newest]]].tolist())
        quiet = (age > 0) & ~seen & (age < WINDOW_S) & np.isinf(silent_at)
        for place in np.flatnonzero(quiet & (age > min(waits, WINDOW_S))):
            if not by_kind or window.state(age[place], None, model) == "silent":
                silent_at[place] = age[place]
    rejected = (kind == 1) & (delay <= WINDOW_S)
    none = kind == 2
    lost = float((silent_at[rejected] < delay[rejected]).mean())
    return lost, float(np.isfinite(silent_at[none]).mean())


def measure(options: Options) -> Measured:
    """Measures the key, the mean over the seeds in the worst world."""
    seeds = range(options.seed, options.seed + SEEDS)
    details: dict[str, Any] = {}
    for world in WORLDS:
        for name, by_kind in (("by_kind", True), ("one_exponential", False)):
            found = [lost_rejections(world, seed, by_kind=by_kind) for seed in seeds]
            lost, silent = (float(np.mean(column)) for column in zip(*found, strict=True))
            details[f"{world}: {name}"] = {"lost": lost, "silence_used": silent}
    worst = max(one["lost"] for name, one in details.items() if name.endswith("by_kind"))
    return Measured({"rejections_as_silence": worst}, details)
