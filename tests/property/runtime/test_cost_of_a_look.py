"""Requests of one look at a run with many workers: the bounds are multiples of their number."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from heartbeats import put_heartbeat

from deltawire.dashboard.status import FRESH_S, WINDOW_S, Watch
from deltawire.events import Life, Span, encode_lines
from deltawire.launch.status_writer import MANY, StatusWriter
from deltawire.runtime import event_tail
from deltawire.runtime.event_tail import EventTail
from deltawire.store import open_bare_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync.chain.objects import create_run
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.signing import Ed25519Signer

WORKERS = 250


class CountingBucket(DelegatingBucket):
    """A bucket over a network; counts requests, and how many are under way at once."""

    def __init__(self, inner, pause_s=0.0):
        super().__init__(inner)
        self.local = False
        self.pause_s = pause_s
        self.requests = Counter()
        self.now = self.most = 0
        self.lock = threading.Lock()

    def _call(self, verb, key, operation):
        with self.lock:
            self.requests[verb] += 1
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            time.sleep(self.pause_s)
            return operation()
        finally:
            with self.lock:
                self.now -= 1


def run_of(workers, signer=None):
    bucket = open_bare_bucket("memory://")
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    public_key = signer.public_key if signer else ""
    run = Run(
        id="ab" * 16,
        name="large",
        created_at=0.0,
        tensors=tensors,
        digest="0" * 32,
        public_key=public_key,
    )
    create_run(bucket, run, signer=signer)
    for number in range(workers):
        name, now = f"w{number}", time.time()
        put_heartbeat(bucket, name, at=now, stored=3)
        life = Life(process=name, at=now, role="worker", what="started")
        span = Span(process=name, activity="sample", start=now - 9, end=now)
        bucket.put(keys.events(f"{name}-n", 0), encode_lines([life, span]))
    return bucket


@pytest.fixture(scope="module")
def large():
    return run_of(WORKERS)


@pytest.fixture
def bucket(large):
    yield CountingBucket(large)
    large.delete(keys.STATUS)


def look(bucket, **settings):
    bucket.requests.clear()
    found = Watch(bucket, **settings).poll()
    return found, sum(bucket.requests.values())


def test_with_a_stored_status_a_look_costs_two_requests(bucket):
    own, requests = look(bucket)
    assert requests > 2 * WORKERS
    assert StatusWriter(bucket).write()
    stored, requests = look(bucket)
    assert requests <= 2
    assert [line.name for line in stored.processes] == [line.name for line in own.processes]
    assert stored.groups_stored == own.groups_stored == 3 * WORKERS
    assert len(bucket.get(keys.STATUS, limit=1 << 24)) < 500 * WORKERS


@pytest.mark.parametrize("damage", ["old", "early", "junk", "other run", "window"])
def test_a_stored_status_that_cannot_be_shown_is_passed_over(bucket, damage):
    StatusWriter(bucket).write()
    settings = {}
    if damage in ("old", "early"):
        shift = (FRESH_S + 1) * (1 if damage == "old" else -1)
        settings = {"clock": lambda: time.time() + shift}
    elif damage == "window":
        settings = {"window_s": WINDOW_S / 2}
    elif damage == "junk":
        bucket.put(keys.STATUS, b"{")
    else:
        data = bucket.get(keys.STATUS, limit=1 << 24)
        bucket.put(keys.STATUS, data.replace(b'"name":"large"', b'"name":"other"', 1))
    found, requests = look(bucket, **settings)
    assert requests > 2 * WORKERS
    assert (found.name, len(found.processes)) == ("large", WORKERS)


def test_a_signed_run_is_shown_from_what_is_signed():
    """Nobody signs the stored status."""
    signer = Ed25519Signer(bytes(32))
    bucket = run_of(MANY, signer=signer)
    StatusWriter(bucket).write()
    data = bucket.get(keys.STATUS, limit=1 << 24)
    bucket.put(keys.STATUS, data.replace(b'"groups_stored":48', b'"groups_stored":0'))
    assert Watch(bucket).poll().groups_stored == 48


def test_a_small_run_stores_none_and_close_deletes_it(bucket):
    small = run_of(MANY - 1)
    assert not StatusWriter(small).write()
    assert not small.exists(keys.STATUS)
    writer = StatusWriter(bucket)
    writer.start()
    writer.write()
    writer.close()
    assert not bucket.exists(keys.STATUS)
    assert not writer.is_alive()


def test_requests_of_a_look_are_made_side_by_side_up_to_a_bound(large):
    bucket = CountingBucket(large, pause_s=0.002)
    tail = EventTail(bucket)
    first = tail.read()
    assert len(first) == 2 * WORKERS
    assert 2 <= bucket.most <= event_tail.READERS
    bucket.requests.clear()
    assert tail.read() == []
    assert sum(bucket.requests.values()) <= WORKERS + 3
