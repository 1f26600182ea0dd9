"""``decay_loss`` and ``decay_false_alarm``: what the hold-back version shows of many promotions.

`PROMOTIONS` candidates follow each other, and each is promoted, as it is worse than the one before
by `STEP` only, within the margin of any canary. `SHARE` of the users keep the first version, drawn
again for each version that serves, which `USERS` users see before the next one. The tests are those
of `deltawire.live.release.hold_back`, with the error rate that guardrails leave to the metric, and
are looked at after every user. The worlds are those of `benchmarks.live.canary` in which levels
drift.

- ``decay_loss``: the mean difference between the first version and the one that serves when users
  are returned to the first; all of the loss where they never are. The worst world.
- ``decay_false_alarm``: every candidate is equal. The lineages that are returned all the same, the
  lower 95 % bound of the worst world.

The details have the loss without a hold-back version, and what it costs: the users who miss the
progress of candidates that are each better by `STEP`, until the hold-back version moves.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.live.canary import WORLDS, bound
from benchmarks.training.keys import Measured, Options
from deltawire.config.release import ReleaseConfig
from deltawire.live.release.hold_back import deposit
from deltawire.live.release.sequential_tests import BETS, ArrivalDifference, log_threshold

LINEAGES = 100
PROMOTIONS = 36
STEP = 0.01
USERS = 2000
SHARE = 0.05
DRIFTING: Final = ("constant", "sites", "bursts")

Array = NDArray[np.float64]


class Lineages(NamedTuple):
    """The number of promotions after which each lineage was returned to its first version
    (`PROMOTIONS` + 1: never), and by which the hold-back version moved for the first time."""

    returned: NDArray[np.int64]
    moved: NDArray[np.int64]


def simulate(
    step: float,
    *,
    seed: int,
    world: str = "constant",
    lineages: int = LINEAGES,
    users: int = USERS,
    share: float = SHARE,
) -> Lineages:
    """Simulates lineages whose candidates differ from the one before by ``step`` each."""
    rng, release = np.random.default_rng(seed), ReleaseConfig(hold_back=share)
    wealth: Array = np.full((lineages, BETS), -np.inf)
    never = np.full(lineages, PROMOTIONS + 1, np.int64)
    found = Lineages(never.copy(), never.copy())
    threshold = log_threshold(release.error_rate / 2)
    shares = np.full((lineages, users), 1 - share)
    for place in range(PROMOTIONS):
        level = np.clip(WORLDS[world](rng, lineages, users), 0.0, 1.0)
        serving = (rng.random((lineages, users)) < 1 - share).astype(float)
        means = np.clip(level + step * (place + 1) * serving, 0.0, 1.0)
        values = (rng.random((lineages, users)) < means).astype(float)
        worse = ArrivalDifference(tolerance=0.0, sign=-1, shape=(lineages,))
        worse.log_wealth = np.logaddexp(wealth, math.log(deposit(place)))
        seen = (worse.add(serving, values, shares) >= threshold).any(axis=1)
        found.returned[seen & (found.returned > PROMOTIONS)] = place + 1
        wealth = worse.log_wealth
        if step > 0:
            better = ArrivalDifference(tolerance=0.0, shape=(lineages,))
            gain = better.add(serving, values, shares)[:, -1]
            moves = gain >= log_threshold(release.error_rate * deposit(place))
            # It moves with the next promotion, by what is shown then.
            found.moved[moves & (found.moved > PROMOTIONS)] = place + 2
        if (found.returned <= PROMOTIONS).all():
            break
    return found


def loss(found: Lineages) -> float:
    """Returns the mean loss when lineages were returned; all of it where they were not."""
    return float(STEP * np.minimum(found.returned, PROMOTIONS).mean())


def measure(options: Options) -> Measured:
    """Measures the keys in all worlds."""
    worlds: dict[str, dict[str, float]] = {}
    for place, world in enumerate(DRIFTING):
        seed = options.seed + 10 * place
        worse = simulate(-STEP, seed=seed, world=world)
        equal = simulate(0.0, seed=seed + 1, world=world)
        better = simulate(STEP, seed=seed + 2, world=world)
        worlds[world] = {
            "loss": loss(worse),
            "promotions": float(worse.returned.mean()),
            "never": float((worse.returned > PROMOTIONS).mean()),
            "false_alarm": bound(int((equal.returned <= PROMOTIONS).sum()), LINEAGES),
            "missed_by_hold_back": float(STEP * better.moved.mean()),
        }
    values = {
        "decay_loss": max(one["loss"] for one in worlds.values()),
        "decay_false_alarm": max(one["false_alarm"] for one in worlds.values()),
    }
    details: dict[str, Any] = {
        "lineages": LINEAGES,
        "users": USERS,
        "share": SHARE,
        "step": STEP,
        "loss_without": STEP * PROMOTIONS,
        "worlds": worlds,
    }
    return Measured(values, details)
