"""Evidence that a reward has diverged from a probe, with a false-alarm rate for the whole run.

**The test.** Each group t gives one number y_t in [0, 1]: the excess of its reward over the probe,
averaged over its episodes (`deltawire.reward_monitor.monitor.excess`). The null hypothesis is
E[y_t | y_1 … y_{t−1}] ≤ b, the tolerance, for every past. Groups need not be independent or
identically distributed; the policy may change at every step.

**A bet.** For 0 ≤ λ < 1/b the factor e_t = 1 + λ (y_t − b) is positive, and under the null
hypothesis its expectation, given the past, is at most 1. So a product of such factors is a
supermartingale: the wealth of a bettor who bets, at fair odds or worse, that the excess exceeds b.

**An unknown start.** Cheating starts somewhere in the run, and a bet since the first group would
have lost its wealth by then. So wealth is invested gradually: a share w_t = 1/(t(t+1)) before
group t; after t groups the rest, 1/(t+1), is still held back. With bets λ_k in equal shares v,

    M_k ← (M_k + w_t) (1 + λ_k (y_t − b)),        E_t = 1/(t+1) + Σ_k v M_k.

E_t begins at 1 and is again a supermartingale: E[E_t | past] ≤ 1/(t+1) + Σ_k v (M_k + w_t)
= E_{t−1}. A change at group s costs it a factor s(s+1), so the delay grows with log s only.

**The false-alarm rate.** By Ville's inequality P(E_t ≥ 1/α for any t) ≤ α, for a run of any length.
There are many streams, one for each probe and family; the n-th to be opened gets
α_n = α/(n(n+1)), and Σ α_n = α. So with probability at least 1 − α no stream of an honest run is
ever flagged.

**The delay.** If every episode cheats (y = 1) from group s on, the largest bet multiplies its
wealth by 1 + λ(1 − b): by about 16 at b = 0.05 with λ = 0.8/b. With K bets it is flagged after
⌈log(K s(s+1) / α_n) / log(1 + λ(1 − b))⌉ groups or less: `delay_bound`.

Sources: Ville, Étude critique de la notion de collectif (1939); betting on bounded means:
Waudby-Smith and Ramdas, arXiv 2010.09686; mixing over the time of a change: Shin, Ramdas and
Rinaldo, arXiv 2203.03532.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""λ b of each bet."""
_MOST = 1e200


def advance(wealth: Sequence[float], count: int, y: float, tolerance: float) -> list[float]:
    """Updates the wealth of every bet for group ``count`` (from 1), of excess ``y``.

    Raises `ValueError` unless 0 ≤ y ≤ 1 and 0 < tolerance < 1.
    """
    if not (0 <= y <= 1 and 0 < tolerance < 1):
        raise ValueError(f"excess {y}, tolerance {tolerance}")
    put_in = 1 / (count * (count + 1))
    return [
        min(_MOST, (had + put_in) * (1 + bet / tolerance * (y - tolerance)))
        for had, bet in zip(wealth, BETS, strict=True)
    ]


def evidence(wealth: Sequence[float], count: int) -> float:
    """E after ``count`` groups; 1 before the first."""
    return 1 / (count + 1) + math.fsum(wealth) / len(BETS)


def threshold(false_alarm: float, number: int) -> float:
    """The evidence at which stream ``number`` (from 1) is flagged."""
    return number * (number + 1) / false_alarm


def delay_bound(
    *, start: int, number: int, false_alarm: float, tolerance: float, y: float = 1.0
) -> int:
    """The number of groups within which stream ``number`` is flagged if the excess is at least
    ``y`` from its group ``start`` on; raises `ValueError` if no bet gains."""
    wanted = math.log(threshold(false_alarm, number) * len(BETS) * start * (start + 1))
    gains = [math.log1p(bet / tolerance * (y - tolerance)) for bet in BETS]
    if max(gains) <= 0:
        raise ValueError(f"an excess of {y} is within the tolerance of {tolerance}")
    return math.ceil(wanted / max(gains))
