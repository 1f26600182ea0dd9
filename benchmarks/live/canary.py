"""``false_promotion_worst`` and the other keys of simulated canaries, in worlds that drift.

Each canary has the stages of the default configuration, one outcome a user, and the tests of
`deltawire.live.release`, which are looked at after every outcome: the metric, and all
guardrails, whose rates do not change. A look rolls back before it promotes. `WORLDS` says what the
level of all users does while outcomes arrive.

- ``false_promotion_worst``: the candidate is always worse by exactly the margin.
- ``false_rollback_worst``: it is equal.
- ``good_promotion_worst``: it is better by `EFFECT`, and promoted within `GOOD_WITHIN` outcomes.
- ``regression_found_after``: it is worse by `EFFECT`, in the world ``constant`` at a share of 0.5.
  The median of the outcomes until it is rolled back, over those that a one-sided test of a fixed
  number needs for an error rate of 0.05 and a power of 0.95.

The first three are of ``--canaries`` of each kind in each of ``--worlds``, and each world that is
done is kept in ``--out``. They are the lower 95 % bounds of the worst world; details have both
bounds and the counts. ``false_promotion`` is simulated without guardrails, which can only lower it.

- ``voters_promote``: the candidate is worse by `VOTED`, and `VOTERS` of the users vote for the arm
  that they guess theirs to be, for the candidate. Arms are hidden, so a guess is right half of the
  time. The details have the share of promotions for better guesses too, and that for more voters.

In the world ``slow_and_fast_arms`` answers of the candidate end later than the serving version's of
the same moment. Outcomes count in the order of the requests; the details have the rates in the
order in which answers end, where both must fail.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.config.release import ReleaseConfig
from deltawire.errors import InputError
from deltawire.live.release.evidence import error_budget, planned_answers
from deltawire.live.release.sequential_tests import ArrivalDifference, log_threshold

CANARIES = 2000
FEW, FEW_BY_END = 500, 200
BATCH = 50
STRETCH = 2000
"""Outcomes after which canaries that have ended are left out of a batch."""
OUTCOMES = 24_000
GOOD_WITHIN = 20_000
RATE = 0.6
EFFECT = 0.05
GUARDED_RATES = {
    "error": 0.01,
    "left": 0.03,
    "slow": 0.05,
    "broken_call": 0.02,
    "cut_off": 0.05,
    "long": 0.1,
    "silent": 0.4,
    "refusal": 0.05,
    "question": 0.15,
    "hedging": 0.1,
    "repetition": 0.02,
}
SLOW_ARM = "slow_and_fast_arms"
LAG = 1000
"""The candidate's answers end when so many later requests have: 50 s at 20 answers a second."""
VOTERS = 0.05
VOTED = 0.04
GUESSES = (0.5, 0.6, 0.75, 1.0)
VOTING = (0.1, 0.2, 0.4, 0.6)
"""Further shares of users who vote."""
NEVER = np.iinfo(np.int64).max

Array = NDArray[np.float64]
Level = Callable[[np.random.Generator, int, int], Array]


def _seasons(rng: np.random.Generator, canaries: int, count: int) -> Array:
    phase = rng.random((canaries, 1))
    return np.asarray(0.5 + 0.3 * np.sin(2 * np.pi * (np.arange(count) / 3000 + phase)))


def _incidents(rng: np.random.Generator, canaries: int, count: int) -> Array:
    begins = rng.integers(0, count, (3, canaries, 1))
    lengths = rng.integers(500, 2000, (3, canaries, 1))
    at = np.arange(count)
    during = ((at >= begins) & (at < begins + lengths)).any(axis=0)
    return np.where(during, 0.12, RATE)


def _sites(rng: np.random.Generator, canaries: int, count: int) -> Array:
    turn = (np.arange(count) // 400 + rng.integers(0, 2, (canaries, 1))) % 2
    return np.where(turn == 1, 0.85, 0.2)


def _bursts(rng: np.random.Generator, canaries: int, count: int) -> Array:
    flips = np.cumsum(rng.random((canaries, count)) < 1 / 50, axis=1)
    return np.where(flips % 3 == 2, 0.1, 0.7)


def _growth(rng: np.random.Generator, canaries: int, count: int) -> Array:
    del rng
    level = 0.3 + 0.5 * np.log1p(np.arange(count) / 500) / math.log1p(count / 500)
    return np.tile(level, (canaries, 1))


def _turnover(rng: np.random.Generator, canaries: int, count: int) -> Array:
    del rng
    return np.tile(0.3 + 0.5 * np.exp(-np.arange(count) / 4000), (canaries, 1))


def _day(rng: np.random.Generator, canaries: int, count: int) -> Array:
    """The level falls through the canary, or rises."""
    fall = np.linspace(0.85, 0.25, count)
    return np.where(rng.random((canaries, 1)) < 0.5, fall, fall[::-1])


def _constant(rng: np.random.Generator, canaries: int, count: int) -> Array:
    del rng
    return np.full((canaries, count), RATE)


WORLDS: Final[dict[str, Level]] = {
    "constant": _constant,
    "seasons": _seasons,
    "incidents": _incidents,
    "sites": _sites,
    "bursts": _bursts,
    "growth": _growth,
    "turnover": _turnover,
    "heavy_users": _constant,
    SLOW_ARM: _day,
}
"""The mean outcome of the serving version, user by user. ``heavy_users``: outcomes are means over
1 to 50 answers of users who differ."""

Order = Literal["request", "end"]


class Simulated(NamedTuple):
    """The end of each canary, and after how many outcomes."""

    promoted: NDArray[np.bool_]
    rolled_back: NDArray[np.bool_]
    outcomes: NDArray[np.int64]


def _assigned(
    rng: np.random.Generator, release: ReleaseConfig, canaries: int, count: int
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Draw arms and shares, and where the last stage may promote."""
    drawn, places = rng.random((canaries, count)), np.arange(count)
    begin, shares = np.zeros((canaries, 1), np.int64), np.full((canaries, count), np.nan)
    ripe = np.zeros((canaries, count), np.bool_)
    for share in release.stages:
        here = places >= begin
        shares = np.where(here, share, shares)
        enough = np.cumsum(here & (drawn < share), axis=1) >= release.stage_outcomes
        ripe = enough
        begin = np.where(enough.any(axis=1), enough.argmax(axis=1) + 1, count)[:, None]
    return (drawn < shares).astype(float), shares, ripe


def _drawn(rng: np.random.Generator, world: str, means: Array) -> Array:
    """Draw outcomes with these means."""
    if world != "heavy_users":
        return (rng.random(means.shape) < means).astype(float)
    answers = np.minimum(rng.zipf(1.5, means.shape), 50)
    own = np.clip(means + 0.2 * np.where(rng.random(means.shape) < 0.5, 1, -1), 0, 1)
    return np.asarray(rng.binomial(answers, own) / answers)


def _first(crossed: NDArray[np.bool_], begin: int) -> NDArray[np.int64]:
    return np.where(crossed.any(axis=1), crossed.argmax(axis=1) + begin, NEVER)


def _ends(
    rng: np.random.Generator,
    release: ReleaseConfig,
    arms: Array,
    values: Array,
    shares: Array,
    ripe: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the outcomes before each canary is shown to harm, and before it is shown to be good;
    `NEVER` for what is not shown before its end. Canaries that have ended are left out."""
    budget, (size, count) = error_budget(release), arms.shape
    metric = ArrivalDifference(tolerance=-release.margin, shape=(size,))
    worse = ArrivalDifference(tolerance=0.0, sign=-1, shape=(size,))
    guards = [
        (GUARDED_RATES[name], ArrivalDifference(tolerance=most, shape=(size,)))
        for name, most in release.guardrails.items()
    ]
    harm, good = np.full(size, NEVER), np.full(size, NEVER)
    going = np.arange(size)
    for begin in range(0, count, STRETCH):
        part = slice(begin, begin + STRETCH)
        z, y, s = arms[going, part], values[going, part], shares[going, part]
        shown = metric.add(z, y, s) >= log_threshold(budget.promotion)
        good[going] = _first(shown & ripe[going, part], begin)
        crossed = worse.add(z, y, s) >= log_threshold(budget.rollback)
        for rate, guard in guards:
            touched = (rng.random(z.shape) < rate).astype(float)
            crossed |= guard.add(z, touched, s) >= log_threshold(budget.guardrail)
        harm[going] = _first(crossed, begin)
        lasts = np.minimum(harm, good)[going] == NEVER
        if not lasts.any():
            break
        going = going[lasts]
        for test in (metric, worse, *(guard for _, guard in guards)):
            test.keep(lasts)
    return harm, good


def simulate(
    release: ReleaseConfig,
    change: float,
    *,
    seed: int,
    world: str = "constant",
    canaries: int = CANARIES,
    count: int = OUTCOMES,
    order: Order = "request",
    guess: float | None = None,
    voters: float = VOTERS,
) -> Simulated:
    """Returns the ends of canaries whose candidate differs by ``change``, after at most ``count``
    outcomes. The share ``voters`` votes if ``guess`` says how often they guess their arm right."""
    rng = np.random.default_rng(seed)
    promoted, rolled_back, outcomes = [], [], []
    for begin in range(0, canaries, BATCH):
        size = min(BATCH, canaries - begin)
        arms, shares, ripe = _assigned(rng, release, size, count)
        level = WORLDS[world](rng, size, count)
        values = _drawn(rng, world, level + change * arms)
        if guess is not None:
            right = rng.random(arms.shape) < guess
            votes = np.where(right, arms, 1 - arms)
            values = np.where(rng.random(arms.shape) < voters, votes, values)
        if order == "end" and world == SLOW_ARM:
            ends = np.argsort(np.arange(count) + LAG * arms, axis=1, kind="stable")
            arms, shares = (np.take_along_axis(one, ends, axis=1) for one in (arms, shares))
            values = np.take_along_axis(values, ends, axis=1)
            ripe = np.take_along_axis(ripe, ends, axis=1)
        harm, good = _ends(rng, release, arms, values, shares, ripe)
        ended = np.minimum(harm, good)
        promoted.append(good < harm)
        rolled_back.append((harm <= good) & (ended != NEVER))
        outcomes.append(np.where(ended == NEVER, count, ended + 1))
    return Simulated(
        np.concatenate(promoted), np.concatenate(rolled_back), np.concatenate(outcomes)
    )


def bound(hits: int, trials: int) -> float:
    """Returns the lower end of the one-sided 95 % Wilson interval of a rate."""
    return bounds(hits, trials)[0]


def bounds(hits: int, trials: int) -> tuple[float, float]:
    """Returns both ends of the Wilson interval of a rate, each a one-sided 95 % bound."""
    z, rate = 1.6449, hits / trials
    middle = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials**2))
    return (middle - spread) / (1 + z * z / trials), (middle + spread) / (1 + z * z / trials)


def fixed_horizon(release: ReleaseConfig, *, effect: float = EFFECT) -> int:
    """Returns the answers of a one-sided z test of error rate 0.05 and power 0.95 with the stages'
    allocation: information adds up to ((1.6449 + 1.6449) / effect)²."""
    rates = RATE, RATE - effect
    spread = [rate * (1 - rate) for rate in rates]
    wanted, answers = (2 * 1.6448536 / effect) ** 2, 0.0
    for share in release.stages:
        information = 1 / (spread[0] / (1 - share) + spread[1] / share)
        length = release.stage_outcomes / share
        if share == release.stages[-1] or wanted <= length * information:
            return math.ceil(answers + wanted / information)
        answers += length
        wanted -= length * information
    raise AssertionError


def counts_of(
    world: str,
    release: ReleaseConfig,
    *,
    seed: int,
    order: Order = "request",
    canaries: int = CANARIES,
) -> dict[str, int]:
    """Returns how many of the canaries of each kind ended so in one world."""
    unguarded = msgspec.structs.replace(release, guardrails={})
    about: dict[str, Any] = {"world": world, "order": order, "canaries": canaries}
    bad = simulate(unguarded, -release.margin, seed=seed, **about)
    same = simulate(release, 0.0, seed=seed + 1, **about)
    good = simulate(release, EFFECT, seed=seed + 2, **about)
    within = good.promoted & (good.outcomes <= GOOD_WITHIN)
    return {
        "false_promotion": int(bad.promoted.sum()),
        "false_rollback": int(same.rolled_back.sum()),
        "good_promotion": int(within.sum()),
    }


def intervals_of(counts: dict[str, int], canaries: int) -> dict[str, tuple[float, float]]:
    """Returns the two 95 % bounds of each rate."""
    return {rate: bounds(hits, canaries) for rate, hits in counts.items()}


def chosen_worlds(wanted: str) -> list[str]:
    """Returns the worlds that ``wanted`` names: ``all``, or names with commas between them."""
    if wanted == "all":
        return list(WORLDS)
    names = wanted.split(",")
    if unknown := [name for name in names if name not in WORLDS]:
        raise InputError(
            f"--worlds: there is no {unknown[0][:64]!r}", hint=f"known: all, {', '.join(WORLDS)}"
        )
    return names


def kept_counts(world: str, release: ReleaseConfig, options: Options) -> dict[str, int]:
    """Returns the counts of a world, which are measured once and then read from ``options.out``."""
    seed = options.seed + 10 * list(WORLDS).index(world)
    path = Path(options.out) / f"canary-counts-{world}-{options.canaries}-{seed}.json"
    if options.out and path.is_file():
        found: dict[str, int] = json.loads(path.read_text())
        return found
    began = time.process_time()
    found = counts_of(world, release, seed=seed, canaries=options.canaries)
    seconds = time.process_time() - began
    words = f"{world}: {seconds:.0f} s of processor time"
    print(words, file=sys.stderr, flush=True)  # noqa: T201
    if options.out:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return found


def promoted_by_voters(guess: float, voters: float, *, seed: int, canaries: int = FEW) -> float:
    """Returns the bound of the share of canaries that promote a candidate which is worse by `VOTED`
    while these users vote."""
    release = ReleaseConfig(stages=[0.5])
    about: dict[str, Any] = {"seed": seed, "canaries": canaries, "count": 10_000}
    found = simulate(release, -VOTED, guess=guess, voters=voters, **about)
    return bound(int(found.promoted.sum()), canaries)


def measure(options: Options) -> Measured:
    """Measures the keys in the chosen worlds."""
    if options.canaries < 1:
        raise InputError("--canaries must be at least 1")
    release, seed = ReleaseConfig(), options.seed
    single = ReleaseConfig(stages=[0.5])
    counts = {
        world: kept_counts(world, release, options) for world in chosen_worlds(options.worlds)
    }
    rates = {world: intervals_of(found, options.canaries) for world, found in counts.items()}
    by_end = counts_of(SLOW_ARM, release, seed=seed + 500, order="end", canaries=FEW_BY_END)
    voted = {f"{guess:g}": promoted_by_voters(guess, VOTERS, seed=seed + 600) for guess in GUESSES}
    voting = {
        f"{guess:g}": {
            f"{voters:g}": promoted_by_voters(guess, voters, seed=seed + 600) for voters in VOTING
        }
        for guess in GUESSES[:2]
    }
    drop = simulate(single, -EFFECT, seed=seed + 3, canaries=FEW, count=10_000)
    found = float(np.median(np.where(drop.rolled_back, drop.outcomes, np.inf)))
    details: dict[str, Any] = {
        "canaries": options.canaries,
        "planned_outcomes": planned_answers(release, effect=EFFECT, rate=RATE),
        "counts": counts,
        "worlds": rates,
        "worst": {
            "false_promotion": max(rates, key=lambda one: rates[one]["false_promotion"]),
            "false_rollback": max(rates, key=lambda one: rates[one]["false_rollback"]),
            "good_promotion": min(rates, key=lambda one: rates[one]["good_promotion"]),
        },
        "slow_and_fast_arms_by_end": intervals_of(by_end, FEW_BY_END),
        "promoted_by_voters_who_guess": voted,
        "promoted_by_more_voters_who_guess": voting,
        "outcomes_until_rollback": found,
        "outcomes_fixed_horizon": fixed_horizon(single),
    }
    values = {
        "false_promotion_worst": max(one["false_promotion"][0] for one in rates.values()),
        "false_rollback_worst": max(one["false_rollback"][0] for one in rates.values()),
        "good_promotion_worst": min(one["good_promotion"][0] for one in rates.values()),
        "voters_promote": voted["0.5"],
        "regression_found_after": found / fixed_horizon(single),
    }
    return Measured(values, details)
