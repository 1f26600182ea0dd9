"""Asks the planner and its simulation about the storms of `benchmarks.scale.storm_run`."""

from __future__ import annotations

import random

import simpy

from deltawire.plan.fleet.rates import CoreCost
from deltawire.plan.fleet.simulation.transfers import ReadingSide
from deltawire.plan.fleet.transfer import Amounts, Readers, follow

MANIFESTS = 2
"""Reads of a version besides its blobs: its manifest, and the name of the next one."""


def fleet(*, needed_s: float, requests: int, readers: int) -> tuple[Amounts, Readers]:
    """Returns a version for which each of ``readers`` makes so many requests, and a fleet in which
    only the limit on reads matters: the store answers all of them in ``needed_s``."""
    blobs = requests - MANIFESTS
    amounts = Amounts(values=1, width=2, changes=0, delta_bytes=blobs, pieces=1, blobs=blobs)
    return amounts, Readers(
        count=readers, share=1.0, per_host=1, cores=1, serial_cores=1, decode=CoreCost(0, 0),
        link_bytes_s=1e12, region_bytes_s=1e12, connection_bytes_s=1e12, get_s=0.1, poll_s=0.001,
        interval_s=0.01, stage_change_s=0, swap_change_s=0, staged_on_cores=False, version_s=0,
        reads_per_s=readers * requests / needed_s,
    )  # fmt: skip


def planned_s(amounts: Amounts, readers: Readers) -> tuple[float, float]:
    """Returns when the last reader has the version by the closed form, and by the simulation."""
    env = simpy.Environment()
    side = ReadingSide(env, readers, random.Random(0))
    reading = [env.process(side.read(amounts, number)) for number in range(readers.count)]
    env.run(simpy.AllOf(env, reading))
    return follow(amounts, readers).seconds, float(env.now)
