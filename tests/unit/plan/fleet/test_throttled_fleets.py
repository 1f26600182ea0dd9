"""The plan's and the simulation's queue at a store's limit, against the rule that readers run."""

import pytest

from benchmarks.scale.storm import simulate_store, simulate_storm
from benchmarks.scale.storm_plan import MANIFESTS, fleet, planned_s
from benchmarks.scale.storm_stores import Queueing
from deltawire.plan.fleet.transfer import follow

BLOBS, READERS = 200, 16
REQUESTS = BLOBS + MANIFESTS


@pytest.mark.parametrize("needed_s", [51, 91, 300])
def test_readers_that_outrun_a_store_take_what_is_planned(needed_s):
    rule_s = simulate_storm(needed_s=needed_s, readers=READERS, blobs=BLOBS).last_s
    found = fleet(needed_s=needed_s, requests=REQUESTS, readers=READERS)
    assert planned_s(*found) == pytest.approx((rule_s, rule_s), rel=0.15)
    # Without the window, readers would make several attempts for each request.
    fixed = simulate_storm(needed_s=needed_s, readers=READERS, blobs=BLOBS, adaptive=False)
    assert fixed.attempts > 3


def test_readers_of_a_store_that_lets_requests_wait_take_what_is_planned():
    """Its rate is what it works on at once, over the time of one; nothing is refused."""
    servers, work_s = 8, 0.1
    needed_s = READERS * REQUESTS * work_s / servers
    store = Queueing(servers=servers, work_s=work_s)
    rule_s = simulate_store(store, needed_s=needed_s, readers=READERS, sizes=[0] * BLOBS).last_s
    planned = follow(*fleet(needed_s=needed_s, requests=REQUESTS, readers=READERS))
    assert planned.seconds == pytest.approx(rule_s, rel=0.15)
