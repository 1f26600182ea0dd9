"""Knapsack: divides completions over prompts so that the predicted gradient is largest.

The value of n completions at pass rate p is v(p, n) = (1 − pⁿ − (1−p)ⁿ) · p(1−p)²: the probability
that their rewards differ, times what such a group is expected to be worth, which is largest at
p = 1/3. Source: Knapsack RL (arXiv 2509.25849), section 3.

v(p, n+1) − v(p, n) = (pⁿ(1−p) + (1−p)ⁿp) · p(1−p)² never rises with n. For such values a greedy
division, one completion at a time to the prompt that gains most, is optimal, so no table over the
budget is needed: O(budget · log prompts).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def gradient_value(rate: float, completions: int) -> float:
    """Returns v(p, n), the predicted value of a group of ``completions`` at pass rate ``rate``."""
    failing = 1 - rate
    mixed = 1 - rate**completions - failing**completions
    return max(0.0, mixed) * rate * failing**2


def marginal_value(rate: float, completions: int) -> float:
    """Returns v(p, n + 1) − v(p, n), the value of one completion more.

    Example::

        marginal_value(0.5, 1)   # 0.0625
    """
    failing = 1 - rate
    return (rate**completions * failing + failing**completions * rate) * rate * failing**2


def divide_budget(
    rates: Sequence[float], spent: Sequence[int], budget: int, *, largest: int
) -> list[int]:
    """Returns how many more completions each prompt gets, at most ``budget`` in all.

    ``rates`` are predicted pass rates, ``spent`` the completions that the prompts have, and no
    prompt gets beyond ``largest`` in all. Ties go to the earlier prompt. A completion that is worth
    nothing is not given.

    Example::

        divide_budget([0.5, 0.99], [4, 4], 8, largest=32)   # [8, 0]
    """
    more = [0] * len(rates)
    heap = [
        (-marginal_value(rate, have), number)
        for number, (rate, have) in enumerate(zip(rates, spent, strict=True))
        if have < largest
    ]
    heapq.heapify(heap)
    for _ in range(max(0, budget)):
        if not heap or heap[0][0] >= 0:
            break
        _, number = heap[0]
        more[number] += 1
        have = spent[number] + more[number]
        if have < largest:
            heapq.heapreplace(heap, (-marginal_value(rates[number], have), number))
        else:
            heapq.heappop(heap)
    return more
