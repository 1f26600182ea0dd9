"""``bisect_wrong``, ``bisect_questions_ratio`` and ``bisect_named_without_culprit``: bisection with
a test that passes by chance.

Each search has 80 candidates. The test passes with .8 before the culprit and with .5 from it on,
which the search does not know. A search that names another version, or none, is wrong. It is
compared with plain bisection that asks each version a fixed number of times, and both ends as
often to learn the rates: with the smallest number that is at most as often wrong. Three further
worlds have no single culprit: one pass rate everywhere, one that falls evenly from .8 to .5, and
one that changes between both every nine versions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.errors import InputError
from deltawire.launch.branches.bisect import Bisected, NoisySearch
from deltawire.launch.branches.journal import BisectAnswer

VERSIONS = 81
CULPRITS = 400
WITHOUT = 100
BEFORE, AFTER = 0.8, 0.5
ERROR = 0.05
FIXED_ROUNDS = 20
"""Rounds of the same culprits for the searches with fixed repetitions, which are quick."""

PassRate = Callable[[int], float]


WORLDS: dict[str, PassRate] = {
    "one rate": lambda _: 0.7,
    "falls evenly": lambda v: BEFORE + (AFTER - BEFORE) * v / (VERSIONS - 1),
    "comes and goes": lambda v: BEFORE if v // 9 % 2 == 0 and v < VERSIONS - 9 else AFTER,
}
"""Pass rates of runs without a single culprit."""


def search(rate: PassRate, rng: np.random.Generator, *, most: int = 3000) -> Bisected:
    """Runs one search with a test that passes with ``rate(version)``."""
    searching = NoisySearch(list(range(VERSIONS)), error=ERROR, most=most)
    while (version := searching.next()) is not None:
        searching.add(BisectAnswer(version, int(rng.random() >= rate(version))))
    return searching.result()


def fixed_repetitions(
    culprit: int, times: int, rng: np.random.Generator, *, known: bool
) -> tuple[bool, int]:
    """Bisects with ``times`` questions for each version; returns whether it found the culprit, and
    the number of questions.

    A version is good if it passes more often than the middle of the two rates: the true ones if
    they are ``known``, else those of as many questions to each of the two ends.
    """

    def passed(version: int) -> int:
        return int(rng.binomial(times, BEFORE if version < culprit else AFTER))

    good, bad = 0, VERSIONS - 1
    middle = times * (BEFORE + AFTER) / 2 if known else (passed(good) + passed(bad)) / 2
    asked = 0 if known else 2 * times
    while bad - good > 1:
        at = (good + bad) // 2
        asked += times
        if passed(at) > middle:
            good = at
        else:
            bad = at
    return bad == culprit, asked


def fewest_repetitions(
    culprits: NDArray[np.int64], wrong: float, rng: np.random.Generator, *, known: bool
) -> dict[str, float]:
    """Returns the smallest number of questions for each version with which plain bisection is at
    most as often ``wrong``, and the mean number of all its questions."""
    many = np.tile(culprits, FIXED_ROUNDS)
    for times in range(10, 1000, 2):
        tried = [fixed_repetitions(int(c), times, rng, known=known) for c in many]
        missed = 1 - float(np.mean([right for right, _ in tried]))
        if missed <= wrong:
            asked = float(np.mean([asked for _, asked in tried]))
            return {"times": times, "wrong": missed, "questions": asked}
    raise InputError("no number of repetitions below 1,000 is as seldom wrong")


def with_culprit(culprit: int) -> PassRate:
    """Returns the pass rates of a run with one culprit."""
    return lambda version: BEFORE if version < culprit else AFTER


def named_in(rate: PassRate, rng: np.random.Generator) -> float:
    """Returns the share of searches of a world without a culprit that name one."""
    return sum(search(rate, rng).culprit is not None for _ in range(WITHOUT)) / WITHOUT


def measure(options: Options) -> Measured:
    """Simulates all searches."""
    rng = np.random.default_rng(options.seed)
    culprits = rng.integers(1, VERSIONS, CULPRITS)
    named = {
        name: named_in(rate, np.random.default_rng([options.seed, number]))
        for number, (name, rate) in enumerate(WORLDS.items())
    }
    found = [search(with_culprit(int(c)), rng) for c in culprits]
    wrong = sum(one.culprit != c for one, c in zip(found, culprits, strict=True)) / CULPRITS
    questions = float(np.mean([one.questions for one in found]))
    fixed = fewest_repetitions(culprits, max(wrong, 1 / CULPRITS), rng, known=False)
    knowing = fewest_repetitions(culprits, max(wrong, 1 / CULPRITS), rng, known=True)
    values = {
        "bisect_wrong": wrong,
        "bisect_questions_ratio": questions / fixed["questions"],
        "bisect_named_without_culprit": max(named.values()),
    }
    details = {
        "questions": questions,
        "no_single_said": sum(one.culprit is None for one in found) / CULPRITS,
        "fixed": fixed,
        "fixed_and_rates_known": knowing,
        "named": named,
    }
    return Measured(values, details)
