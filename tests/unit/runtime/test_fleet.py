"""The fleet: which processes are alive, from their heartbeats."""

from __future__ import annotations

import pytest
from heartbeats import put_heartbeat

from deltawire.runtime.fleet import Fleet
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys

SILENCE_S = 15.0


class Time:
    now = 1000.0


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def bucket():
    return open_bare_bucket("memory://")


def fleet_of(bucket, time):
    return Fleet(bucket, silence_s=SILENCE_S, clock=lambda: time.now, wall_clock=lambda: time.now)


def test_a_worker_is_alive_while_its_heartbeat_changes(bucket, time):
    """The times are of another machine's clock, hours away: only a change counts."""
    fleet = fleet_of(bucket, time)
    for second in range(40):
        put_heartbeat(bucket, "beating", number=second, at=-9e5)
        if second < 10:
            put_heartbeat(bucket, "silent", number=second, at=9e5)
        time.now += 1
        fleet.poll()
        assert ("beating" in fleet.workers) == (second > 0), "at first only its age is known"
        assert ("silent" in fleet.workers) == (second <= 9 + SILENCE_S)
    put_heartbeat(bucket, "silent", number=99)
    fleet.poll()
    assert fleet.workers == {"beating", "silent"}


@pytest.mark.parametrize("changes", [{"ended": True}, {"quiet_s": 6.0}])
def test_a_worker_that_ends_or_stalls_is_out_at_once(bucket, time, changes):
    put_heartbeat(bucket, "a", at=time.now)
    fleet = fleet_of(bucket, time)
    fleet.poll()
    assert fleet.workers == {"a"}
    put_heartbeat(bucket, "a", number=1, at=time.now, **changes)
    fleet.poll()
    assert fleet.workers == set()
    assert fleet.known_workers == {"a"}


def test_only_workers_are_workers(bucket, time):
    put_heartbeat(bucket, "trainer", "trainer", at=time.now)
    for name in ("a/b.json", "a.txt", ".json", "ok.json"):
        bucket.put(f"{keys.HEARTBEATS}{name}", b"{}")
    fleet = fleet_of(bucket, time)
    fleet.poll()
    assert (fleet.workers, set(fleet.states)) == (set(), {"trainer"})
    assert [error.key for error in fleet.errors] == [keys.heartbeat("ok")]


def test_a_damaged_heartbeat_is_not_the_end_of_a_worker(bucket, time):
    put_heartbeat(bucket, "a", at=time.now)
    fleet = fleet_of(bucket, time)
    fleet.poll()
    bucket.put(keys.heartbeat("a"), b"{")
    time.now += 1
    fleet.poll()
    assert fleet.workers == {"a"}
    assert len(fleet.errors) == 1
    time.now += SILENCE_S
    fleet.poll()
    assert fleet.workers == set()


def test_polls_are_as_rare_as_asked_for(bucket, time):
    faulty = FaultyBucket(bucket)
    fleet = fleet_of(faulty, time)
    for _ in range(10):
        fleet.poll(every_s=1.0)
        time.now += 0.5
    assert len(faulty.operations) == 5


def test_a_process_that_is_not_read_in_a_poll_is_judged_by_the_listing(bucket, time):
    """A bounded fleet reads a tenth of the heartbeats in a poll, and notices silence as before."""
    names = [f"w{number:02d}" for number in range(40)]
    fleet = Fleet(
        bucket,
        silence_s=SILENCE_S,
        most_read=4,
        clock=lambda: time.now,
        wall_clock=lambda: time.now,
    )
    for second in range(60):
        for name in names[:20] if second >= 20 else names:
            put_heartbeat(bucket, name, number=second, at=time.now)
        time.now += 1
        fleet.poll()
        assert set(names[:20]) <= fleet.workers
    assert fleet.workers == set(names[:20])
    put_heartbeat(bucket, names[0], number=99, at=time.now, ended=True)
    for _ in range(len(names) // 4):
        time.now += 1
        fleet.poll()
    assert fleet.states[names[0]] == "ended"
