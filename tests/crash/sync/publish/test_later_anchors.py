"""Anchors follow their versions: no version waits for one, and a lost one is made up for."""

import threading

import pytest
from anchored import anchor_of
from shard_ranks import RANKS, close, publish_all, rank_publisher

from deltawire.errors import RetryError
from deltawire.store import DelegatingBucket, open_bare_bucket, retrying
from deltawire.sync import Publisher, Subscriber, load_mirror, newest_version, prune
from deltawire.sync.chain.objects import later_anchors
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket, no_answer
from deltawire.testing.tiny import audit, same_bits, start_publisher, start_run, weights
from deltawire.wire import keys


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


class Held(DelegatingBucket):
    """Holds the creation of anchors back until told."""

    def __init__(self, inner):
        super().__init__(inner)
        self.go, self.waiting = threading.Event(), threading.Event()

    def create(self, key, data):
        if key.endswith("-anchor.json"):
            self.waiting.set()
            assert self.go.wait(250)
        return super().create(key, data)


def opened(bucket, **options):
    run = start_run(bucket)
    return Publisher(
        bucket, run, empty_mirror(run), epoch=0, anchor_every=2, compaction_strides=(), **options
    )


def test_the_next_version_is_committed_while_an_anchor_is_stored():
    inner = open_bare_bucket("memory://")
    bucket = Held(inner)
    publisher = opened(bucket)
    for version in range(4):  # The anchor of version 2 is under way when 3 is committed.
        publisher.publish(weights(version))
        publisher.flush()
    assert bucket.waiting.wait(250)
    assert newest_version(inner) == 3
    assert audit(inner, weights) == 3
    assert later_anchors(inner, newer_than=-1) == []
    # The weights of version 4 would take the place of those that the anchor is made from.
    waiter = threading.Thread(target=publisher.publish, args=(weights(4),))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    bucket.go.set()
    waiter.join(250)
    assert not waiter.is_alive()
    publisher.close()
    assert later_anchors(inner, newer_than=-1) == [2, 4]
    assert audit(inner, weights) == 4
    assert check_run(inner).faults == []


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_each_operation_of_an_anchor_fails_in_turn(done):
    """No version is held up; what is committed can be read; the next version has the anchor."""
    for at in range(1, 20):
        bucket, reports = FaultyBucket(open_bare_bucket("memory://")), []
        publisher = start_publisher(bucket, anchor_every=2, on_anchor=reports.append)
        for version in range(2):
            publisher.publish(weights(version))
        publisher.flush()
        before = len(bucket.operations)
        publisher.publish(weights(2))
        Publisher.flush(publisher)
        publisher.close()
        # The delta's blob, run.json, the manifest, the floors, the intents twice, the blob's size.
        commit = 7
        operations = len(bucket.operations) - before - commit
        assert 4 <= operations <= 8

        bucket, reports = FaultyBucket(open_bare_bucket("memory://")), []
        publisher = start_publisher(bucket, anchor_every=2, on_anchor=reports.append)
        for version in range(2):
            publisher.publish(weights(version))
        publisher.flush()
        bucket.fail(at=commit + at, times=None, done=done, error=no_answer)
        publisher.publish(weights(2))
        publisher.flush()
        assert newest_version(bucket.inner) == 2
        assert audit(bucket.inner, weights) == 2
        assert check_run(bucket.inner, deep=True).whole
        failed = bool(reports[-1].error)
        bucket.heal()
        publisher.publish(weights(3))
        publisher.close()
        anchored = [v for v in (2, 3) if anchor_of(bucket.inner, start_run(bucket), v)]
        assert anchored
        assert failed == (3 in anchored), "a version has the anchor that could not be made before"
        assert check_run(bucket.inner, deep=True).whole
        if not failed:
            assert at > operations
            return
    raise AssertionError("it never got through")


def test_a_new_publisher_makes_the_anchor_that_a_killed_one_did_not():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=4)
    for version in range(5):
        if version == 4:
            bucket.fail("create", "*-anchor.json", times=None, error=no_answer)
        publisher.publish(weights(version))
        publisher.flush()
    publisher.close()
    bucket.heal()
    assert later_anchors(bucket, newer_than=-1) == []
    publisher = start_publisher(bucket, anchor_every=4)
    for version in range(5, 8):
        publisher.publish(weights(version))
    publisher.close()
    assert later_anchors(bucket, newer_than=-1) == [5], "and no other before the next multiple"
    restarted = start_publisher(bucket, anchor_every=4)
    restarted.publish(weights(8))
    restarted.close()
    assert later_anchors(bucket, newer_than=-1) == [5, 8]


def test_readers_take_the_anchor_and_retention_hangs_on_it():
    bucket = open_bare_bucket("memory://")
    publisher = start_publisher(bucket, anchor_every=5)
    for version in range(18):
        publisher.publish(weights(version))
    publisher.close()
    finder = RouteFinder(bucket, publisher.run, held=None, goal=17)
    route = finder.find()
    assert [edge.kind for edge in route.edges] == ["anchor", "delta", "delta"]
    found = prune(bucket, publisher.run, cutoff=14, grace_s=0)
    assert (found.anchor, found.pruned_below) == (10, 10)
    for version in range(10, 18):
        held = load_mirror(bucket, publisher.run, at=version)
        assert same_bits(held.tensors, weights(version))
    subscriber = Subscriber(bucket, publisher.run, load_mirror(bucket, publisher.run, at=10))
    assert subscriber.advance()
    assert check_run(bucket).faults == []


def test_ranks_make_an_anchor_together_after_their_commit():
    bucket, reports = open_bare_bucket("memory://"), []
    publishers = [
        rank_publisher(bucket, rank, anchor_every=2, on_anchor=reports.append)
        for rank in range(RANKS)
    ]
    for version in range(4):
        assert publish_all(publishers, version) == [None] * RANKS
    close(publishers)
    assert later_anchors(bucket, newer_than=-1) == [2]
    assert [(one.version, one.error) for one in reports] == [(2, "")], "the leader reports"
    assert bucket.list(keys.PARTS) == []
    assert audit(bucket, weights) == 3
    assert check_run(bucket, deep=True).faults == []


@pytest.mark.parametrize("stage", ["upload", "part"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_whose_anchor_fails_stops_no_version(rank, stage, monkeypatch):
    """The others learn of it at once instead of waiting for its part."""
    inner = open_bare_bucket("memory://")
    buckets = [FaultyBucket(inner) for _ in range(RANKS)]
    publishers = [
        rank_publisher(bucket, number, anchor_every=2, timeout_s=3600)
        for number, bucket in enumerate(buckets)
    ]
    for version in range(2):
        assert publish_all(publishers, version) == [None] * RANKS
    if stage == "part":
        buckets[rank].fail("create", "*/anchor-*", times=None, error=no_answer)
    else:

        def fail(*_):
            raise RetryError("the store does not answer")

        monkeypatch.setattr(publishers[rank]._writer, "upload_anchor", fail)
    for version in range(2, 6):
        assert publish_all(publishers, version) == [None] * RANKS
    close(publishers)
    assert later_anchors(inner, newer_than=-1) == []
    assert audit(inner, weights) == 5
