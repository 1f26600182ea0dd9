"""The version poller: few requests, growing pauses, and a run that changes under its readers."""

import pytest

from deltawire.errors import CorruptError, ResyncError
from deltawire.store import open_bare_bucket, retrying
from deltawire.sync import load_mirror
from deltawire.sync.chain.version_poller import (
    JITTER,
    LIST_EVERY_POLLS,
    LONGEST_PAUSE,
    VersionPoller,
    newest_readable,
)
from deltawire.testing.faulty import FaultyBucket, half
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


class Clock:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self):
        return self.now


def fill(bucket, last, *, anchor_every=3):
    publisher = start_publisher(bucket, anchor_every=anchor_every)
    for version in range(publisher.version + 1, last + 1):
        publisher.publish(weights(version))
    publisher.close()
    return publisher.run


@pytest.fixture
def bucket():
    return FaultyBucket(open_bare_bucket("memory://"))


def test_an_idle_poll_is_one_request_and_a_listing_now_and_then(bucket):
    run = fill(bucket.inner, 3)
    poller = VersionPoller(bucket, run)
    assert poller.newer(3) is None
    del bucket.operations[:]
    for _ in range(LIST_EVERY_POLLS - 1):
        assert poller.newer(3) is None
    assert bucket.operations == [("get", keys.manifest(4))] * (LIST_EVERY_POLLS - 1)
    assert poller.newer(3) is None
    assert ("list", keys.MANIFESTS) in bucket.operations


def test_the_newest_or_the_nearest(bucket):
    run = fill(bucket.inner, 5)
    poller = VersionPoller(bucket, run)
    assert poller.newer(-1).version == 5
    assert poller.newer(2).version == 5
    assert poller.newer(2, nearest=True).version == 3
    assert poller.newer(4).version == 5


def test_pauses_grow_with_the_age_of_the_newest_version_and_vary(bucket):
    run = fill(bucket.inner, 0)
    clock, draw = Clock(), [0.5]
    poller = VersionPoller(bucket, run, clock=clock, rng=lambda: draw[0])
    shortest = bucket.poll_s
    assert poller.pause_s == pytest.approx(shortest)
    clock.now = 4 * 20 * shortest
    assert poller.pause_s == pytest.approx(4 * shortest)
    clock.now = 1e6
    assert poller.pause_s == pytest.approx(LONGEST_PAUSE * shortest)
    pauses = []
    for draw[0] in (0.0, 1.0):
        pauses.append(poller.pause_s / (LONGEST_PAUSE * shortest))
    assert pauses == pytest.approx([1 - JITTER, 1 + JITTER])
    assert poller.newer(-1).version == 0
    draw[0] = 0.5
    assert poller.pause_s == pytest.approx(shortest)


def test_a_damaged_manifest_is_read_again_with_growing_pauses(bucket):
    run = fill(bucket.inner, 3)
    whole = bucket.inner.get(keys.manifest(3), limit=1 << 20)
    bucket.inner.put(keys.manifest(3), b"junk")
    clock = Clock()
    poller = VersionPoller(bucket, run, clock=clock)
    for _ in range(100):
        clock.now += 1.0
        assert poller.newer(2) is None
    assert poller.alarm.key == keys.manifest(3)
    reads = bucket.operations.count(("get", keys.manifest(3)))
    assert 3 <= reads <= 12, f"{reads} reads in 100 polls"
    bucket.inner.put(keys.manifest(3), whole)
    clock.now += 61.0
    assert poller.newer(2).version == 3
    assert poller.alarm is None


def test_one_damaged_answer_does_not_cost_a_joiner_the_newest_version(bucket):
    run = fill(bucket.inner, 3)
    bucket.damage(keys.manifest(3), lambda data: data[:-1], times=1)
    assert newest_readable(bucket, run).version == 3
    bucket.damage(keys.manifest(3), lambda data: data[:-1])
    assert newest_readable(bucket, run).version == 2
    for version in range(3):
        bucket.inner.put(keys.manifest(version), b"")
    with pytest.raises(CorruptError, match="manifest"):
        newest_readable(bucket, run)


def poll_until_it_raises(poller, held):
    for _ in range(2 * LIST_EVERY_POLLS):
        assert poller.newer(held) is None


def test_a_run_that_was_replaced_is_noticed(bucket):
    run = fill(bucket.inner, 3)
    poller = VersionPoller(bucket, run)
    assert poller.newer(3) is None
    for key in bucket.inner.list(""):
        bucket.inner.delete(key)
    fill(bucket.inner, 2)
    with pytest.raises(ResyncError, match="another run"):
        poll_until_it_raises(poller, 3)


@pytest.mark.parametrize("left", ["nothing", "run.json", "older versions"])
def test_a_run_that_was_emptied_or_set_back_is_noticed(bucket, left):
    run = fill(bucket.inner, 3)
    poller = VersionPoller(bucket, run)
    assert poller.newer(3) is None
    kept = {
        "nothing": (),
        "run.json": (keys.RUN,),
        "older versions": (keys.RUN, keys.manifest(0), keys.manifest(1)),
    }[left]
    for key in bucket.inner.list(""):
        if key not in kept:
            bucket.inner.delete(key)
    with pytest.raises(Exception, match="no run here" if left == "nothing" else "set back"):
        poll_until_it_raises(poller, 3)


def test_a_version_that_was_lost_under_an_idle_reader_is_an_alarm(bucket):
    """Nothing newer comes, so nothing else would tell that no reader can join any more."""
    run = fill(bucket.inner, 3)
    poller, key = VersionPoller(bucket, run), keys.manifest(3)
    poll_until_it_raises(poller, 3)
    assert poller.alarm is None
    whole, rival = bucket.inner.get(key, limit=1 << 20), open_bare_bucket("memory://")
    rival.put(keys.RUN, bucket.inner.get(keys.RUN, limit=1 << 20))
    fill(rival, 3)
    for data, alarm in (
        (half(whole), "not a valid manifest"),
        (rival.get(key, limit=1 << 20), "replaced by another"),
        (whole, None),
    ):
        bucket.inner.put(key, data)
        poll_until_it_raises(poller, 3)
        assert (poller.alarm is None) == (alarm is None)
        assert alarm is None or alarm in str(poller.alarm)


def test_one_bad_answer_is_neither_an_alarm_nor_a_run_set_back(bucket):
    run = fill(bucket.inner, 3)
    poller, key = VersionPoller(bucket, run), keys.manifest(3)
    for answer in (half, lambda _data: None):
        bucket.replace("get", key, answer=answer)
        bucket.replace("head", key, answer=lambda _found: None)
        poll_until_it_raises(poller, 3)
        assert poller.alarm is None


def test_one_lost_manifest_is_not_a_run_set_back(bucket):
    run = fill(bucket.inner, 3)
    poller = VersionPoller(bucket, run)
    bucket.inner.delete(keys.manifest(2))
    poll_until_it_raises(poller, 3)
    bucket.inner.put(keys.manifest(4), b"")
    bucket.inner.delete(keys.manifest(3))
    poll_until_it_raises(poller, 3)


def test_a_reader_does_not_go_back_by_itself(bucket):
    run = fill(bucket.inner, 3)
    mirror = load_mirror(bucket, run)
    bucket.inner.delete(keys.manifest(3))
    with pytest.raises(ResyncError, match="newer than any"):
        load_mirror(bucket, run, into=mirror)
    assert mirror.version == 3
    assert load_mirror(bucket, run, at=2, into=mirror).version == 2
