"""The requests of a trainer's poll do not grow with its workers, but for one listing."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import pytest
from heartbeats import make_heartbeat, put_heartbeat

from benchmarks.scale import workers as fleet_of_workers
from deltawire.rl.control import rollout_buffer, worker_guard
from deltawire.rl.rollout.group_numbers import next_sequence
from deltawire.store import open_bare_bucket
from deltawire.testing.simulated import PAGE_KEYS, SimulatedBucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import TrainerStatus

READ, MISSED, LISTED = 8, 16, 4
POLLS = 30


@pytest.fixture
def small_limits(monkeypatch):
    """Limits that a few workers exceed; returns the guard's clock."""
    monkeypatch.setattr(fleet_of_workers, "MOST_READ", READ)
    monkeypatch.setattr(rollout_buffer, "MOST_MISSED", MISSED)
    monkeypatch.setattr(worker_guard, "MOST_LISTED", LISTED)
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(worker_guard, "time", clock)
    return clock


@pytest.fixture
def opened(small_limits):
    """Opens controls, and closes them at the end."""
    controls = []

    def make(bucket, workers):
        controls.append(fleet_of_workers.Control(bucket, workers))
        return controls[-1]

    yield make
    for control in controls:
        control.close()


def counting(bucket):
    return SimulatedBucket(bucket, latency_s=0.0, reads_per_s=1e9, writes_per_s=1e9)


@pytest.mark.parametrize("workers", [50, 200])
def test_the_requests_of_a_poll_are_bounded(small_limits, opened, workers):
    inner = open_bare_bucket("memory://")
    names = [f"w{number:03d}" for number in range(workers)]
    for name in names:
        put_heartbeat(inner, name, at=time.time(), first=0)
    bucket = counting(inner)
    control = opened(bucket, workers)
    control.turn()
    stored = dict.fromkeys(names, 0)
    for name in names:
        fleet_of_workers._store(inner, control, name, stored)
    fetched = 0
    for number in range(POLLS):
        small_limits.now += 1.0
        for name in names:
            put_heartbeat(inner, name, number=number + 1, stored=stored[name], first=0)
        bucket.requests = Counter()
        before = control.buffer.waiting
        fetched += control.turn()
        arrived = max(0, control.buffer.waiting - before) + control.buffer.waiting
        assert bucket.requests["list"] <= 1 + LISTED
        assert bucket.requests["get"] <= READ + 2 * MISSED + arrived
        assert bucket.requests["put"] <= 2, "trainer.json, and once more after a commit"
    assert fetched == workers, "every group was trained on"


def test_every_heartbeat_is_read_in_turn_and_nobody_is_silent(opened):
    inner = open_bare_bucket("memory://")
    control = opened(counting(inner), 40)
    for number in range(2 * 40 // READ):
        for worker in range(40):
            put_heartbeat(inner, f"w{worker:02d}", number=number)
        control.fleet.poll()
    numbers = [one.number for one in control.fleet.heartbeats.values()]
    assert min(numbers) >= 40 // READ - 1
    assert len(control.fleet.workers) == 40


def test_a_worker_that_returns_lists_the_groups_after_its_predecessors():
    inner = open_bare_bucket("memory://")
    last = 2 * PAGE_KEYS + 7
    for number in range(last + 3):
        inner.put(keys.rollout("w0", number), b"")
    status = TrainerStatus(
        phase="training", version=0, digest="", epoch=1, credits={"w0": last + 9}, at=0.0
    )
    inner.put(keys.TRAINER, encode_json(status))
    bucket = counting(inner)
    heartbeat = SimpleNamespace(predecessor=make_heartbeat("w0", stored=last))
    process = SimpleNamespace(bucket=bucket, name="w0", heartbeat=heartbeat)
    assert next_sequence(process) == last + 3
    assert bucket.requests["list"] == 1
    heartbeat.predecessor = None
    assert next_sequence(process) == last + 3
    assert bucket.requests["list"] == 1 + 3, "without a predecessor, all of them"
