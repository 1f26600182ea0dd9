"""The subscriber's other faces: wait for a version, follow, call back, beside an event loop."""

import asyncio
import threading

import pytest

from deltawire.errors import BugError, CorruptError, RetryError
from deltawire.store import open_bucket
from deltawire.sync import Subscriber, chain, load_mirror
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import same_bits, start_publisher, weights
from deltawire.wire import keys


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(chain, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def world():
    bucket = FaultyBucket(open_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=0)
    publisher.publish(weights(0))
    publisher.flush()
    yield bucket, publisher, Subscriber(bucket, publisher.run, load_mirror(bucket, publisher.run))
    publisher.close()


def test_wait_for_a_version_that_is_still_to_come(world):
    _bucket, publisher, subscriber = world
    seen = []
    subscriber.on_version(seen.append)

    def publish():
        for version in (1, 2, 3):
            publisher.publish(weights(version))
        publisher.flush()

    thread = threading.Thread(target=publish)
    thread.start()
    assert subscriber.wait_for(3, timeout_s=60) == 3
    thread.join()
    assert same_bits(subscriber.mirror.tensors, weights(3))
    assert seen == sorted(set(seen))
    assert seen[-1] == 3
    assert subscriber.wait_for(1) == 3


def test_waiting_ends(world):
    _, _, subscriber = world
    with pytest.raises(RetryError, match="version 1 was not committed"):
        subscriber.wait_for(1, timeout_s=0.05)


def test_follow_until_told_to_stop(world):
    _, publisher, subscriber = world
    for version in (1, 2, 3, 4):
        publisher.publish(weights(version))
    publisher.flush()
    stop, seen = threading.Event(), []
    for version in subscriber.follow(stop=stop):
        assert subscriber.mirror.version == version
        seen.append(version)
        if version == 4:
            stop.set()
    assert seen == [1, 2, 3, 4]


def test_beside_an_event_loop(world):
    _, publisher, subscriber = world

    async def main():
        publisher.publish(weights(1))
        assert await subscriber.wait_for_async(1, timeout_s=60) == 1
        seen = []
        publisher.publish(weights(2))
        publisher.publish(weights(3))
        async for version in subscriber.follow_async():
            seen.append(version)
            if version == 3:
                break
        assert not await subscriber.advance_async()
        with pytest.raises(RetryError):
            await subscriber.wait_for_async(9, timeout_s=0.05)
        return seen

    assert asyncio.run(main()) == [2, 3]
    assert same_bits(subscriber.mirror.tensors, weights(3))


def test_an_update_for_another_version_is_refused(world):
    _, publisher, subscriber = world
    publisher.publish(weights(1))
    publisher.flush()
    update = subscriber.prepare()
    subscriber.commit(update)
    with pytest.raises(BugError, match="an update of version 0"):
        subscriber.commit(update)
    assert same_bits(subscriber.mirror.tensors, weights(1))


def test_a_lost_manifest_is_an_error_that_names_it_and_no_stall(world):
    """Version 1 is gone, 2 is there, and nothing leads around: it must not be waited for."""
    bucket, publisher, subscriber = world
    for version in (1, 2):
        publisher.publish(weights(version))
    publisher.flush()
    bucket.hide(keys.manifest(1))
    with pytest.raises(CorruptError, match="manifest is missing") as caught:
        subscriber.wait_for(1, timeout_s=20)
    assert caught.value.version == 1
    bucket.heal()
    assert subscriber.advance()
    assert subscriber.mirror.version == 2


def test_waiting_costs_one_request_a_poll(world):
    bucket, _, subscriber = world
    subscriber.prepare()
    before = len(bucket.operations)
    for _ in range(10):
        assert subscriber.prepare() is None
    assert bucket.operations[before:] == [("get", keys.manifest(1))] * 10
