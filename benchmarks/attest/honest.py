"""``false_alarms``: tensors that are not equal after honest updates of small engines.

Each of four fleets (dense or with experts, on one rank or two) loads 50 versions one after the
other by its own loader. Every other version is compared with digests only, as the file of a trainer
gives them; every fifth update of the mixture of experts divides the experts between the ranks.
"""

from __future__ import annotations

from benchmarks.attest.engines import attest_engine, drawn, fleet, load, side, stepped
from benchmarks.training.keys import Measured, Options
from deltawire.attest.sides import Side

UPDATES = 50
"""Updates of each fleet."""


def measure(options: Options) -> Measured:
    """Makes the updates, and counts what is not equal."""
    alarms, looks, tensors = 0, 0, 0
    for ranks in (1, 2):
        for experts in (False, True):
            weights = drawn(options.seed, experts=experts)
            modules = fleet(ranks, weights)
            for update in range(UPDATES):
                before, weights = weights, stepped(weights, options.seed + update)
                if experts and update % 5 == 0:
                    modules = fleet(ranks, before, ep=update % 10 == 0)
                for module in modules:
                    load(module, weights)
                reference = side(weights, f"version {update}")
                if update % 2:
                    reference = Side(reference.name, reference.digests)
                report = attest_engine(modules, reference, side(before, "the version before"))
                alarms += len(report.tensors) - report.counts["equal"]
                looks, tensors = looks + 1, tensors + len(report.tensors)
    return Measured({"false_alarms": alarms}, {"updates": looks, "tensors": tensors})
