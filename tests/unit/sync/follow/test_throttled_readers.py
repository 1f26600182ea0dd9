"""Readers of a store that refuses requests: late, never dead, and towards the newest version."""

import pytest

from deltawire.errors import RetryError, ThrottledError
from deltawire.store import open_bare_bucket
from deltawire.store.bucket import Bucket
from deltawire.store.request_limit import limit_of, note_refusal
from deltawire.sync import Subscriber, load_mirror
from deltawire.sync.chain.version_poller import LONGEST_PAUSE, VersionPoller
from deltawire.sync.follow import follower as follower_module
from deltawire.sync.follow import subscriber as subscriber_module
from deltawire.sync.follow.follower import Follower
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys


class Refused:
    """Steps whose store refuses a few times, and then gives nothing."""

    def __init__(self, error, times):
        self.bucket = open_bare_bucket("memory://")
        self.pause_s = 0.001
        self.alarm = None
        self.error, self.left = error, times

    def prepare(self):
        self.left -= 1
        if self.left >= 0:
            raise self.error
        raise SystemExit("all refusals were waited out")


@pytest.mark.parametrize(
    ("error", "waited_out"), [(ThrottledError("slow down"), True), (RetryError("gone"), False)]
)
def test_a_follower_waits_refusals_out(monkeypatch, error, waited_out):
    monkeypatch.setattr(follower_module, "LONGEST_PAUSE_S", 0.001)
    steps = Refused(error, 5)
    follower = Follower(steps, patience_s=0.0)
    follower.start()
    follower._thread.join(60)
    assert (steps.left < 0) is waited_out
    follower.close()


@pytest.mark.parametrize("late", [True, False])
def test_a_reader_that_is_late_looks_for_the_newest_version(monkeypatch, late):
    monkeypatch.setattr(subscriber_module, "LATE_S", -1.0 if late else 1e9)
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=100)
    for version in range(3):
        publisher.publish(weights(version), wait=True)
    subscriber = Subscriber(bucket, publisher.run, load_mirror(bucket, publisher.run, at=0))
    first = subscriber.prepare()
    assert first.version == 1
    subscriber.commit(first)
    publisher.publish(weights(3), wait=True)
    del bucket.operations[:]
    subscriber.commit(subscriber.prepare())
    assert (("get", keys.manifest(3)) in bucket.operations) is late
    subscriber.advance()
    assert subscriber.mirror.version == 3
    publisher.close()


def test_a_following_loop_waits_refusals_out(monkeypatch):
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket)
    publisher.publish(weights(0), wait=True)
    subscriber = Subscriber(bucket, publisher.run, load_mirror(bucket, publisher.run))
    publisher.publish(weights(1), wait=True)
    publisher.close()
    step, refusals = subscriber._step, [ThrottledError("slow down")] * 3

    def refused():
        if refusals:
            raise refusals.pop()
        return step()

    monkeypatch.setattr(subscriber, "_step", refused)
    assert next(subscriber.follow()) == 1
    assert not refusals


def test_polls_take_a_share_of_what_a_store_that_refuses_allows():
    inner = open_bare_bucket("memory://")
    bucket = Bucket(inner.store, "s3://polls-take-a-share/run", local=False)
    run = start_publisher(inner).run
    poller = VersionPoller(bucket, run, rng=lambda: 0.5)
    assert poller.pause_s == bucket.poll_s
    window = limit_of(bucket.url).window
    window.answered(0.0, 0.1)
    window.size = 0.05  # A request in two seconds.
    assert poller.pause_s == bucket.poll_s, "no refusal yet"
    note_refusal(bucket.url)
    assert poller.pause_s == pytest.approx(10.0)
    assert poller.pause_s > LONGEST_PAUSE * bucket.poll_s
    window.size = 1e-3
    assert poller.pause_s == pytest.approx(60.0)
