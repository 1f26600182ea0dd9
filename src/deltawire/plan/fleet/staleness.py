"""Mean staleness of asynchronous training in closed form, with the time of the transfer added.

Source of the first two terms: Applied Compute, "Staleness in fully async RL" (3 July 2026), whose
predictions for six runs were off by -0.06 to +0.27 versions. The time of a transfer is not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessParts:
    """Versions between sampling and training, by cause; their sum is the mean.

    Example::

        staleness(batch=512, concurrent=2048, seconds=120, tail=2.5, queue=1, step_s=60,
                  transfer_s=10).mean
    """

    rollout: float
    queue: float
    transfer: float
    ratio: float
    """Rollouts made over rollouts consumed, in time; above 1 the trainer binds."""

    @property
    def mean(self) -> float:
        """The mean staleness, in versions."""
        return self.rollout + self.queue + self.transfer


def staleness(
    *,
    batch: float,
    concurrent: float,
    seconds: float,
    tail: float,
    queue: float,
    step_s: float,
    transfer_s: float,
) -> StalenessParts:
    """Computes the mean staleness of ``concurrent`` rollouts of ``seconds`` each.

    With ρ = rollouts made over consumed, ``rollout`` is concurrent·tail / (batch·max(1, ρ)) and
    ``queue`` is ρ below 1, else (2·queue + ρ - 1) / (2ρ), where ``queue`` counts batches. A version
    that arrives ``transfer_s`` after its step ends is missing to all that is sampled meanwhile:
    transfer_s over the period of a step, which is step_s, or longer if rollouts bind.
    """
    ratio = concurrent / seconds / (batch / step_s)
    period_s = step_s / min(1.0, ratio)
    return StalenessParts(
        rollout=concurrent * tail / (batch * max(1.0, ratio)),
        queue=ratio if ratio < 1 else (2 * queue + ratio - 1) / (2 * ratio),
        transfer=transfer_s / period_s,
        ratio=ratio,
    )


def engines_needed(
    *, batch: float, seconds: float, per_engine: float, step_s: float, pause_s: float
) -> int:
    """Returns how many engines keep a trainer busy that takes ``batch`` rollouts each ``step_s``.

    An engine finishes ``per_engine / seconds`` rollouts a second, and none while it swaps, for
    ``pause_s`` of every step.
    """
    working = max(1.0 - pause_s / step_s, 1e-6)
    return math.ceil(batch / step_s / (per_engine / seconds * working))
