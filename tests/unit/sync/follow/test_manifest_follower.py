"""Versions and digests without weights: the newest that can be read, and nothing made up."""

import pytest

from deltawire.errors import RetryError
from deltawire.store import RetryingBucket, open_bare_bucket, retrying
from deltawire.sync import Follower, ManifestFollower
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def world():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket.inner, anchor_every=100)
    yield bucket, publisher
    publisher.close()


def publish(publisher, *versions):
    for version in versions:
        publisher.publish(weights(version))
    publisher.flush()


def step(manifests):
    update = manifests.prepare()
    if update is None:
        return None
    assert (update.base, update.pieces, dict(update.patches)) == (manifests.version, [], {})
    manifests.commit(update)
    return update.version


def test_nothing_then_each_then_the_newest(world):
    bucket, publisher = world
    manifests = ManifestFollower(RetryingBucket(bucket), publisher.run)
    assert step(manifests) is None
    publish(publisher, 0)
    assert manifests.prepare().digest == publisher.digest
    assert step(manifests) == 0
    assert step(manifests) is None
    publish(publisher, 1)
    assert step(manifests) == 1
    publish(publisher, 2, 3, 4, 5)
    assert manifests.prepare().digest == publisher.digest
    assert step(manifests) == 5
    assert not [key for operation, key in bucket.operations if keys.BLOBS in key]


def test_a_lost_version_is_avoided(world):
    bucket, publisher = world
    manifests = ManifestFollower(RetryingBucket(bucket), publisher.run)
    publish(publisher, 0, 1, 2, 3)
    bucket.inner.delete(keys.manifest(0))
    assert step(manifests) == 3
    publish(publisher, 4, 5)
    bucket.inner.delete(keys.manifest(4))
    found = [step(manifests) for _ in range(40)]
    assert [version for version in found if version is not None] == [5]


def test_damage_is_avoided_or_reported(world):
    bucket, publisher = world
    manifests = ManifestFollower(RetryingBucket(bucket), publisher.run)
    publish(publisher, 0, 1, 2)
    for version in (1, 2):
        bucket.inner.put(keys.manifest(version), b"{}")
    assert step(manifests) == 0
    assert manifests.prepare() is None
    assert manifests.alarm.key == keys.manifest(2)
    publish(publisher, 3)
    bucket.inner.put(keys.manifest(10**10 - 1), b"not one")
    assert step(manifests) == 3
    assert [manifests.prepare() for _ in range(40)] == [None] * 40
    assert manifests.alarm.key == keys.manifest(10**10 - 1)
    bucket.inner.delete(keys.manifest(10**10 - 1))
    [manifests.prepare() for _ in range(40)]
    assert manifests.alarm is None


def test_a_follower_takes_it_in_place_of_a_subscriber(world):
    bucket, publisher = world
    publish(publisher, 0)
    manifests = ManifestFollower(RetryingBucket(bucket), publisher.run)
    follower = Follower(manifests)
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


def test_a_store_that_does_not_answer_is_reported(world):
    bucket, publisher = world
    publish(publisher, 0)
    manifests = ManifestFollower(RetryingBucket(bucket), publisher.run)
    bucket.fail("get", times=retrying.RETRIES + 1)
    with pytest.raises(RetryError):
        manifests.prepare()
    assert step(manifests) == 0
