"""Posterior: what is known of each task's pass rate, with old evidence discounted.

A task's pass rate is Beta(1 + Σ γ^(v−u)·s, 1 + Σ γ^(v−u)·f) at version v, over its completions at
versions u: s successes and f failures, γ the discount. Evidence older than H versions, where
γᴴ < 0.01, is dropped. So the posterior at a version is a function of the decisions that the last H
versions committed, and a trainer that restarts reads it back from their manifests.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from hashlib import blake2b

MAX_TASKS = 1 << 17
"""Tasks that are remembered; beyond them, those that were not seen for longest are forgotten."""
NEGLIGIBLE = 0.01


def task_key(identity: str) -> str:
    """Returns the 16 hexadecimal digits by which a task is recorded."""
    return blake2b(identity.encode(errors="replace"), digest_size=8).hexdigest()


def horizon_of(discount: float) -> int:
    """Returns H, the number of versions after which evidence is dropped."""
    return math.ceil(math.log(NEGLIGIBLE) / math.log(discount))


class TaskPosterior:
    """The posteriors of all tasks.

    Example::

        posterior = TaskPosterior(0.95)
        posterior.observe("task 1", successes=3, failures=1, version=7)
        posterior.mean("task 1", version=7)   # 4 / 6
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.horizon = horizon_of(discount)
        self._evidence: OrderedDict[str, list[tuple[int, int, int]]] = OrderedDict()

    def observe(self, task: str, *, successes: int, failures: int, version: int) -> None:
        """Adds completions that ``version`` committed."""
        kept = self._evidence.pop(task, [])
        self._evidence[task] = [*self._recent(kept, version), (version, successes, failures)]
        while len(self._evidence) > MAX_TASKS:
            self._evidence.popitem(last=False)

    def _recent(
        self, found: list[tuple[int, int, int]], version: int
    ) -> list[tuple[int, int, int]]:
        return [one for one in found if version - one[0] < self.horizon]

    def beta(self, task: str, *, version: int) -> tuple[float, float]:
        """Returns the two parameters of a task's Beta distribution; (1, 1) if it is not known."""
        successes = failures = 1.0
        for at, passed, failed in self._recent(self._evidence.get(task, []), version):
            weight = self.discount ** (version - at)
            successes += weight * passed
            failures += weight * failed
        return successes, failures

    def mean(self, task: str, *, version: int) -> float:
        """Returns the expected pass rate of a task; 1/2 if it is not known."""
        successes, failures = self.beta(task, version=version)
        return successes / (successes + failures)

    def knows(self, task: str, *, version: int) -> bool:
        """Returns whether there is recent evidence of a task."""
        return bool(self._recent(self._evidence.get(task, []), version))
