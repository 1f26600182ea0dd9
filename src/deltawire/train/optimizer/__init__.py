"""Optimizers by name, with parameter groups, schedules, and states in device or host memory.

A step is made bucket by bucket (a layer of the model each), so that states may lie in host memory
and be on the device for their own bucket only; the arithmetic is the same either way, to the bit.
"""

from deltawire.train.optimizer.groups import Rule, rules_of
from deltawire.train.optimizer.optimizer import Optimizer, StepSettings, open_optimizer
from deltawire.train.optimizer.schedule import rate_factor

__all__ = ["Optimizer", "Rule", "StepSettings", "open_optimizer", "rate_factor", "rules_of"]
