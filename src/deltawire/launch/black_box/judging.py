"""Decides from log-probabilities whether an endpoint serves a version, at a stated error rate.

Each sequence is one outcome of bounded tests (`deltawire.live.release.sequential_tests`), so the
error rate holds however early a look stops. With x the endpoint's log-probabilities of a sequence,
a and b those of two versions in float32, and e the gap of a bf16 pass of the reference on this
machine to its float32 pass:

- **nearer**: z = ((x - a)·d)/‖d‖ - ‖d‖/2 with d = b - a is negative on average if the endpoint
  serves a and positive if it serves b, whatever else rounds, as long as rounding has no preferred
  side along d. z is divided by 3 root mean squares of e, and cut to [-1, 1].
- **fit**: (g - 2e)/(g + 2e) of the mean gaps g = |x - a| and e. Two versions of which neither is
  the endpoint's are told from it by this test only.

The error rate is divided evenly among the tests, two of each kind and pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.errors import CorruptError
from deltawire.live.release.sequential_tests import ArmDifference, log_threshold

Floats = NDArray[np.float64]
Score = Callable[[Sequence[int]], Floats]
"""Returns the log-probability of each token after the first, float64[T - 1]."""

Verdict = Literal["same", "different", "cannot tell"]

NOISE = 2.0
"""Gaps up to this multiple of bf16's own count as rounding."""
DEVIATIONS = 3.0
BATCH = 8
"""Sequences between two decisions."""
DRAWN = 16
"""Tokens that are drawn after each sequence, to examine the prefix cache."""


class ScoredEndpoint(Protocol):
    """Scores and draws tokens."""

    def forced(self, tokens: Sequence[int]) -> Floats:
        """Returns the log-probability of each given token after the first."""

    def drawn(self, prompt: Sequence[int], count: int) -> tuple[list[int], Floats] | None:
        """Draws tokens at temperature 1, and returns them and their log-probabilities; None if the
        endpoint does not say which tokens it drew."""


@dataclass(frozen=True)
class ScoredVersion:
    """A version: ``exact`` scores in float32, ``rounded`` in bf16."""

    name: str
    exact: Score
    rounded: Score


class BlackBoxReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict on an endpoint.

    ``fits`` names the given version that is nearest, if each other one was shown to be farther.
    ``cause`` says why it is different, if that is known: ``version``, or ``prefix cache`` if the
    weights are the same. ``gaps`` are mean gaps in nats by version, ``noise`` that of a bf16 pass
    of the reference. ``error`` bounds the probability of any false statement of one report.
    """

    endpoint: str
    reference: str
    verdict: Verdict
    error: float
    sequences: int
    tokens: int
    noise: float
    gaps: dict[str, float]
    fits: str = ""
    cause: Literal["", "version", "prefix cache"] = ""
    notes: list[str] = []

    @property
    def problem(self) -> str:
        """Says what is different, in one sentence; empty if that is not certain."""
        if self.verdict != "different":
            return ""
        why = {
            "version": f": {self.fits} fits best",
            "prefix cache": ": its prefix cache holds what other weights computed",
            "": "",
        }[self.cause]
        return f"{self.endpoint} answers differently than {self.reference}{why}"


class TwoSided:
    """Evidence that the mean of payoffs in [-1, 1] is above 0, or below."""

    def __init__(self) -> None:
        self._tests = {sign: ArmDifference(tolerance=0.0, sign=sign) for sign in (1, -1)}

    def add(self, payoff: float) -> None:
        """Adds one payoff."""
        for test in self._tests.values():
            test.add(np.array([payoff]))

    def decided(self, error: float) -> int:
        """Returns 1 if the mean is above 0, -1 if it is below, and 0 if neither is certain."""
        for sign, test in self._tests.items():
            if test.log_evidence >= log_threshold(error):
                return sign
        return 0


def fit_payoff(gaps: Floats, noise: Floats) -> float:
    """Returns how far the mean gap exceeds `NOISE` times the noise, from -1 to 1."""
    gap, allowed = float(gaps.mean()), NOISE * float(noise.mean())
    return (gap - allowed) / (gap + allowed) if gap + allowed else 0.0


def nearer_payoff(given: Floats, first: Floats, second: Floats, noise: Floats) -> float:
    """Returns by how much ``given`` is nearer to ``second`` than to ``first``, from -1 to 1."""
    shift = second - first
    length = float(np.linalg.norm(shift))
    if not length:
        return 0.0
    side = float((given - first) @ shift) / length - length / 2
    scale = DEVIATIONS * max(float(np.sqrt(np.mean(noise**2))), 1e-7)
    return float(np.clip(side / scale, -1.0, 1.0))


ROUNDS = 3
"""How often tokens are drawn after one cached prompt. An endpoint may give the same ones each time,
which is no further evidence. Three rounds keep the error where all answers are repeated, which a
drill of `tests/unit/launch/black_box` simulates; twelve rounds after eight prompts do not."""


class EndpointTests:
    """Collects the scores of sequences and decides.

    Example::

        tests = EndpointTests(["version 4", "version 3"], error=0.01)
        tests.add(given, [exact4, exact3], noise)
        tests.weights  # "same", "different" or "cannot tell"
    """

    def __init__(self, names: Sequence[str], *, error: float) -> None:
        self.names = list(names)
        pairs = list(combinations(range(len(names)), 2))
        self._error = error / (2 * (len(pairs) + 2))
        self._fit, self._cache = TwoSided(), TwoSided()
        self._pairs = {pair: TwoSided() for pair in pairs}
        self.sequences, self.tokens, self.drawn = 0, 0, 0
        self._gaps = np.zeros(len(names))
        self._noise = 0.0

    def add(self, given: Floats, exact: Sequence[Floats], noise: Floats) -> None:
        """Adds a sequence: the endpoint's log-probabilities, those of each version, and the gaps of
        a bf16 pass of the first version."""
        self.sequences += 1
        self.tokens += len(given)
        self._gaps += [float(np.abs(given - logprobs).sum()) for logprobs in exact]
        self._noise += float(noise.sum())
        self._fit.add(fit_payoff(np.abs(given - exact[0]), noise))
        for (first, second), test in self._pairs.items():
            test.add(nearer_payoff(given, exact[first], exact[second], noise))

    def add_drawn(self, given: Floats, exact: Floats, noise: Floats) -> None:
        """Adds tokens that the endpoint drew after a prompt that it may have cached."""
        self.drawn += 1
        self._cache.add(fit_payoff(np.abs(given - exact), noise))

    @property
    def fits(self) -> int | None:
        """The number of the version that was shown to be nearer than each other one."""
        beaten: dict[int, int] = {}
        for (first, second), test in self._pairs.items():
            side = test.decided(self._error)
            if side:
                nearer = second if side > 0 else first
                beaten[nearer] = beaten.get(nearer, 0) + 1
        best = [number for number, count in beaten.items() if count == len(self.names) - 1]
        return best[0] if best else None

    @property
    def weights(self) -> Verdict:
        """The verdict on the weights."""
        fit = self._fit.decided(self._error)
        farther = any(
            test.decided(self._error) > 0 for pair, test in self._pairs.items() if pair[0] == 0
        )
        if fit > 0 or farther:
            return "different"
        known = len(self.names) == 1 or self.fits == 0
        return "same" if fit < 0 and known else "cannot tell"

    @property
    def stale_cache(self) -> bool:
        """Returns whether answers after cached prompts do not fit, though the weights do."""
        return self.weights == "same" and self._cache.decided(self._error) > 0

    @property
    def cache_undecided(self) -> bool:
        """Returns whether the weights are the same, but nothing is certain of cached prompts."""
        return self.weights == "same" and not self._cache.decided(self._error)

    @property
    def finished(self) -> bool:
        """Returns whether further sequences cannot change what is reported of the weights."""
        if self.weights == "different":
            return len(self.names) == 1 or self.fits is not None
        return self.weights == "same"

    def report(self, endpoint: str, notes: Sequence[str] = ()) -> BlackBoxReport:
        """Returns what was decided so far."""
        fits, stale = self.fits, self.stale_cache
        verdict: Verdict = "different" if stale else self.weights
        cause: Literal["", "version", "prefix cache"] = ""
        if stale:
            cause = "prefix cache"
        elif verdict == "different" and fits:
            cause = "version"
        count = max(self.tokens, 1)
        return BlackBoxReport(
            endpoint=endpoint,
            reference=self.names[0],
            verdict=verdict,
            error=self._error * 2 * (len(self._pairs) + 2),
            sequences=self.sequences,
            tokens=self.tokens,
            noise=self._noise / count,
            gaps={n: float(gap) / count for n, gap in zip(self.names, self._gaps, strict=True)},
            fits="" if fits is None else self.names[fits],
            cause=cause,
            notes=list(notes),
        )


def check_endpoint(
    endpoint: ScoredEndpoint,
    versions: Sequence[ScoredVersion],
    sequences: Sequence[Sequence[int]],
    *,
    name: str,
    fresh: Iterator[int],
    vocabulary: int,
    error: float,
    cached: int | None = None,
) -> BlackBoxReport:
    """Asks the endpoint about sequences until a decision is certain, and returns it.

    The first token of each teacher-forced sequence is replaced by one of ``fresh``, so that no
    prefix cache answers. Tokens are drawn after the first ``cached`` sequences as they are, those
    that earlier looks may have left in the cache; None if that is not known, for as many as the
    weights take. While only the cache is undecided, more tokens are drawn after the same sequences,
    up to `ROUNDS` times each: answers after others would hide a stale cache. Raises `CorruptError`
    if these are not tokens of the ``vocabulary``, or more than were asked for.
    """
    tests = EndpointTests([version.name for version in versions], error=error)
    reference = versions[0]

    def drawn_after(sequence: Sequence[int]) -> bool:
        """Adds drawn tokens; returns whether the endpoint says which they are."""
        drawn = endpoint.drawn(sequence, DRAWN)
        if drawn is None:
            return False
        if len(drawn[0]) > DRAWN or not all(0 <= token < vocabulary for token in drawn[0]):
            raise CorruptError(
                f"{name} was asked for {DRAWN} tokens below {vocabulary}, and gives others"
            )
        whole, at = [*sequence, *drawn[0]], len(sequence) - 1
        after = reference.exact(whole)[at:]
        tests.add_drawn(drawn[1], after, np.abs(reference.rounded(whole)[at:] - after))
        return True

    told = True
    for number, sequence in enumerate(sequences):
        if number % BATCH == 0 and tests.finished:
            break
        tokens = [next(fresh), *sequence[1:]]
        exact = [version.exact(tokens) for version in versions]
        tests.add(endpoint.forced(tokens), exact, np.abs(reference.rounded(tokens) - exact[0]))
        if told and (cached is None or number < cached):
            told = drawn_after(sequence)
    again = tests.sequences if cached is None else min(cached, len(sequences))
    most = min(len(sequences), ROUNDS * again)
    while told and tests.cache_undecided and tests.drawn < most:
        told = drawn_after(sequences[tests.drawn % again])
    notes = []
    if not told:
        notes = ["the endpoint does not say which tokens it draws: no cache was examined"]
    elif tests.cache_undecided:
        notes = ["whether the answers after cached prompts fit is not certain: look again"]
    return tests.report(name, notes)
