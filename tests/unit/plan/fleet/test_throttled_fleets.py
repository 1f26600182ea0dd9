"""The plan's and the simulation's queue at a store's limit, against the rule that readers run."""

import random

import pytest
import simpy

from benchmarks.scale.storm import simulate_store, simulate_storm
from benchmarks.scale.storm_stores import Queueing
from deltawire.plan.fleet.rates import CoreCost
from deltawire.plan.fleet.simulation.transfers import ReadingSide
from deltawire.plan.fleet.transfer import Amounts, Readers, follow

BLOBS, READERS = 200, 16


def fleet(needed_s):
    """A fleet of which only the limit on reads matters, and a version for it."""
    amounts = Amounts(values=1, width=2, changes=0, delta_bytes=BLOBS, pieces=1, blobs=BLOBS)
    requests = READERS * (BLOBS + 2)
    readers = Readers(
        count=READERS, share=1.0, per_host=1, cores=1, serial_cores=1, decode=CoreCost(0, 0),
        link_bytes_s=1e12, region_bytes_s=1e12, connection_bytes_s=1e12, get_s=0.1, poll_s=0.001,
        interval_s=0.01, stage_change_s=0, swap_change_s=0, staged_on_cores=False, version_s=0,
        reads_per_s=requests / needed_s,
    )  # fmt: skip
    return amounts, readers


@pytest.mark.parametrize("needed_s", [51, 91, 300])
def test_readers_that_outrun_a_store_take_what_is_planned(needed_s):
    amounts, readers = fleet(needed_s)
    rule_s = simulate_storm(needed_s=needed_s, readers=READERS, blobs=BLOBS).last_s
    assert follow(amounts, readers).seconds == pytest.approx(rule_s, rel=0.15)
    env = simpy.Environment()
    side = ReadingSide(env, readers, random.Random(0))
    reading = [env.process(side.read(amounts, number)) for number in range(READERS)]
    env.run(simpy.AllOf(env, reading))
    assert env.now == pytest.approx(rule_s, rel=0.15)
    # Without the window, readers would make several attempts for each request.
    fixed = simulate_storm(needed_s=needed_s, readers=READERS, blobs=BLOBS, adaptive=False)
    assert fixed.attempts > 3


def test_readers_of_a_store_that_lets_requests_wait_take_what_is_planned():
    """Its rate is what it works on at once, over the time of one; nothing is refused."""
    servers, work_s = 8, 0.1
    needed_s = READERS * (BLOBS + 2) * work_s / servers
    amounts, readers = fleet(needed_s)
    store = Queueing(servers=servers, work_s=work_s)
    rule_s = simulate_store(store, needed_s=needed_s, readers=READERS, sizes=[0] * BLOBS).last_s
    assert follow(amounts, readers).seconds == pytest.approx(rule_s, rel=0.15)
