"""Learning-rate schedules: pure functions of the step, so that resuming needs no state."""

from __future__ import annotations

import math

from deltawire.config import ScheduleConfig


def rate_factor(config: ScheduleConfig, step: int) -> float:
    """Returns the factor on every group's learning rate in the ``step``-th optimizer step, from 1.

    It rises linearly to 1 over ``warmup_steps``, follows the schedule until ``steps``, and stays at
    ``floor`` from there on. ``wsd`` (warm-up, stable, decay; Hu et al. 2024, MiniCPM) stays at 1
    and falls linearly over the last ``decay_steps``.
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    first = config.warmup_steps
    if config.kind == "wsd":
        first = config.steps - config.decay_steps
    done = min(1.0, max(0.0, (step - first) / (config.steps - first)))
    fall = done if config.kind != "cosine" else (1 - math.cos(math.pi * done)) / 2
    return 1.0 - (1.0 - config.floor) * fall
