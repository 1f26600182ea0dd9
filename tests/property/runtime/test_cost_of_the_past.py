"""A run that has seen 10,000 workers costs its readers what its living workers cost."""

from __future__ import annotations

from collections import Counter

import pytest
from heartbeats import put_heartbeat

from deltawire.config import RunConfig
from deltawire.dashboard.status import Watch
from deltawire.events import Life, encode_lines
from deltawire.rl.control.credits import CreditIssuer
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.runtime.event_archive import EventArchiver
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import Fleet
from deltawire.runtime.heartbeat import read_tombstone
from deltawire.runtime.reaper import MAX_REAPED, REAP_AFTER_S, Reaper
from deltawire.store import open_bare_bucket
from deltawire.sync.chain.objects import create_run
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger
from deltawire.wire.run import Run, TensorSpec

GONE = 10_000
LIVING = 5
CONFIG = RunConfig(name="old")


class Time:
    now = 0.0


def put_events(bucket, name, *, segments):
    for number in range(segments):
        life = Life(process=name, at=0.0, role="worker", what="started", detail=str(number))
        bucket.put(keys.events(f"{name}-n", number), encode_lines([life]))


def run_of(*, gone, segments=1):
    """A bucket, after its trainer has removed what workers that are gone had left."""
    bucket = open_bare_bucket("memory://")
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        bucket, Run(id="ab" * 16, name="old", created_at=0.0, tensors=tensors, digest="0" * 32)
    )
    time = Time()
    ledger = Ledger()
    issuer = CreditIssuer(bucket, CONFIG, ledger, epoch=1, granted={})
    buffer = RolloutBuffer(bucket, ledger, limit=issuer.staleness.limit)
    fleet = Fleet(bucket, silence_s=30.0, clock=lambda: time.now, wall_clock=lambda: time.now)
    reaper = Reaper(bucket, clock=lambda: time.now)
    archiver = EventArchiver(bucket, clock=lambda: time.now)

    def poll():
        fleet.poll()
        while reaped := reaper.run(fleet, issuer.is_settled):
            assert len(reaped) <= MAX_REAPED
            for worker in reaped:
                issuer.forget(worker)
                buffer.forget(worker)
        issuer.observe(buffer, fleet.workers)
        issuer.write("training")
        archiver.archive()

    for name in (f"gone{number}" for number in range(gone)):
        # One half ended in order, the others were killed.
        put_heartbeat(bucket, name, ended=hash(name) % 2 == 0, stored=0)
        bucket.create(keys.lease(name, 0), b"n")
        put_events(bucket, name, segments=segments)
    for number in range(LIVING):
        put_heartbeat(bucket, f"live{number}", at=time.now)
        bucket.create(keys.lease(f"live{number}", 0), b"n")
        put_events(bucket, f"live{number}", segments=segments)
    for beat in range(4):
        for number in range(LIVING):
            put_heartbeat(bucket, f"live{number}", number=beat + 1, at=time.now)
        poll()
        time.now += REAP_AFTER_S
    return bucket, issuer, buffer


def cost_of_readers(bucket, issuer, buffer):
    """Requests and listed objects of one round of every reader, after a first round."""
    faulty = FaultyBucket(bucket)
    listed = Counter()
    inner_list, inner_names = bucket.list_objects, bucket.list_prefixes

    def count_objects(prefix, *, after=None):
        found = inner_list(prefix, after=after)
        listed[prefix] += len(found)
        return found

    def count_names(prefix):
        found = inner_names(prefix)
        listed[prefix] += len(found)
        return found

    bucket.list_objects, bucket.list_prefixes = count_objects, count_names
    watch, tail = Watch(faulty), EventTail(faulty)
    fleet = Fleet(faulty, silence_s=1e9)
    buffer._bucket = faulty
    for _ in range(2):
        faulty.operations.clear()
        listed.clear()
        watch.poll()
        tail.read(everything=True)
        fleet.poll()
        buffer.poll(fleet.known_workers, issuer.granted())
    bucket.list_objects, bucket.list_prefixes = inner_list, inner_names
    return Counter(verb for verb, _ in faulty.operations), listed


@pytest.mark.timeout(280)
def test_ten_thousand_workers_that_are_gone_cost_nothing():
    old, new = run_of(gone=GONE), run_of(gone=0)
    requests, listed = cost_of_readers(*old)
    requests_new, listed_new = cost_of_readers(*new)
    assert requests == requests_new
    assert listed == listed_new
    bucket = old[0]
    assert len(bucket.list(keys.HEARTBEATS)) == LIVING
    assert len(bucket.list_prefixes(keys.EVENTS)) == LIVING
    assert len(bucket.list(keys.LEASES)) == LIVING
    assert len(bucket.list(keys.TOMBSTONES)) == GONE
    assert read_tombstone(bucket, "gone7").process == "gone7"
    assert len(bucket.get(keys.TRAINER, limit=1 << 20)) < 1000


def test_the_events_of_workers_that_are_gone_are_still_read():
    bucket, _, _ = run_of(gone=300, segments=2)
    read = [(event.process, event.detail) for event in EventTail(bucket).read(everything=True)]
    names = [*(f"gone{n}" for n in range(300)), *(f"live{n}" for n in range(LIVING))]
    assert sorted(read) == sorted((name, detail) for name in names for detail in "01")
    assert len(bucket.list(keys.ARCHIVE)) <= 2
