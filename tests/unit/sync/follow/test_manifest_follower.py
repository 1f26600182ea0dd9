"""Versions and digests without weights: the newest that can be read, and nothing made up."""

import pytest

from deltawire.errors import RetryError
from deltawire.store import open_bucket, retrying
from deltawire.sync import Follower, ManifestFollower
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def world():
    bucket = FaultyBucket(open_bucket("memory://"))
    publisher = start_publisher(bucket.inner, anchor_every=100)
    yield bucket, publisher
    publisher.close()


def publish(publisher, *versions):
    for version in versions:
        publisher.publish(weights(version))
    publisher.flush()


def step(announced):
    update = announced.prepare()
    if update is None:
        return None
    assert (update.base, update.pieces, dict(update.patches)) == (announced.version, [], {})
    announced.commit(update)
    return update.version


def test_nothing_then_each_then_the_newest(world):
    bucket, publisher = world
    announced = ManifestFollower(bucket, publisher.run)
    assert step(announced) is None
    publish(publisher, 0)
    assert announced.prepare().digest == publisher.digest
    assert step(announced) == 0
    assert step(announced) is None
    publish(publisher, 1)
    assert step(announced) == 1
    publish(publisher, 2, 3, 4, 5)
    assert announced.prepare().digest == publisher.digest
    assert step(announced) == 5
    assert not [key for operation, key in bucket.operations if keys.BLOBS in key]


def test_a_version_that_is_lost_is_got_around(world):
    bucket, publisher = world
    announced = ManifestFollower(bucket, publisher.run)
    publish(publisher, 0, 1, 2, 3)
    bucket.inner.delete(keys.manifest(0))
    assert step(announced) == 3
    publish(publisher, 4, 5)
    bucket.inner.delete(keys.manifest(4))
    found = [step(announced) for _ in range(40)]
    assert [version for version in found if version is not None] == [5]


def test_damage_is_got_around_or_named(world):
    bucket, publisher = world
    announced = ManifestFollower(bucket, publisher.run)
    publish(publisher, 0, 1, 2)
    for version in (1, 2):
        bucket.inner.put(keys.manifest(version), b"{}")
    assert step(announced) == 0
    assert announced.prepare() is None
    assert announced.alarm.key == keys.manifest(2)
    publish(publisher, 3)
    bucket.inner.put(keys.manifest(10**10 - 1), b"not one")
    assert step(announced) == 3
    assert [announced.prepare() for _ in range(40)] == [None] * 40
    assert announced.alarm.key == keys.manifest(10**10 - 1)
    bucket.inner.delete(keys.manifest(10**10 - 1))
    [announced.prepare() for _ in range(40)]
    assert announced.alarm is None


def test_a_follower_takes_it_in_place_of_a_subscriber(world):
    bucket, publisher = world
    publish(publisher, 0)
    announced = ManifestFollower(bucket, publisher.run)
    follower = Follower(announced)
    follower.start()
    try:
        for version in range(4):
            while (update := follower.poll()) is None:
                pass
            assert (update.version, update.digest) == (version, publisher.digest)
            publish(publisher, version + 1)
            follower.commit(update)
    finally:
        follower.close()


def test_a_store_that_does_not_answer_says_so(world):
    bucket, publisher = world
    publish(publisher, 0)
    announced = ManifestFollower(bucket, publisher.run)
    bucket.fail("get", times=retrying.RETRIES + 1)
    with pytest.raises(RetryError):
        announced.prepare()
    assert step(announced) == 0
