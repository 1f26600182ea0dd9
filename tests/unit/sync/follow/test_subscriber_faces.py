"""The subscriber's other interfaces: wait, follow, callbacks, and an event loop."""

import asyncio
import threading
from contextlib import closing
from itertools import count

import pytest

from deltawire.errors import BugError, CorruptError, ResyncError, RetryError
from deltawire.store import open_bare_bucket, retrying
from deltawire.sync import Subscriber, load_mirror, open_mirror
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import same_bits, start_publisher, start_run, weights
from deltawire.wire import keys


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def world():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
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


def test_follow_until_stopped(world):
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


def test_within_an_event_loop(world):
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


def test_a_wait_that_was_cancelled_and_the_next_one_do_not_move_the_mirror_at_once(
    world, monkeypatch
):
    """Cancelling leaves a thread that has prepared version 1. The next wait begins meanwhile."""
    _, publisher, subscriber = world
    publisher.publish(weights(1))
    publisher.flush()
    begun, go_on, committed = threading.Event(), threading.Event(), threading.Event()
    prepared, calls = subscriber.prepare, count()

    def prepare():
        call, update = next(calls), prepared()
        if call == 0:
            begun.set()
            go_on.wait(20)
        elif update is not None:
            committed.wait(20)
        return update

    monkeypatch.setattr(subscriber, "prepare", prepare)
    subscriber.on_version(lambda _: committed.set())

    async def main():
        first = asyncio.create_task(subscriber.wait_for_async(1))
        await asyncio.to_thread(begun.wait, 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(subscriber.wait_for_async(1))
        await asyncio.sleep(0.1)
        go_on.set()
        return await second

    assert asyncio.run(main()) == 1
    assert same_bits(subscriber.mirror.tensors, weights(1))


def test_a_mirror_that_holds_nothing_is_filled_first(world, tmp_path):
    bucket, publisher, _ = world
    for version in (1, 2):
        publisher.publish(weights(version))
    publisher.flush()
    with closing(open_mirror(tmp_path / "mirror", publisher.run)) as mirror:
        subscriber = Subscriber(bucket, publisher.run, mirror)
        seen = []
        subscriber.on_version(seen.append)
        with pytest.raises(ResyncError, match="holds no version"):
            subscriber.prepare()
        assert subscriber.wait_for(2) == 2
        publisher.publish(weights(3))
        publisher.flush()
        assert next(subscriber.follow()) == 3
        assert same_bits(mirror.tensors, weights(3))
        assert seen == [2, 3]


def test_nothing_is_published_yet():
    bucket = open_bare_bucket("memory://")
    subscriber = Subscriber(bucket, start_run(bucket), empty_mirror(start_run(bucket)))
    assert not subscriber.advance()
    with pytest.raises(RetryError, match="was not committed"):
        subscriber.wait_for(0, timeout_s=0.01)
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.close()
    assert subscriber.advance()
    assert same_bits(subscriber.mirror.tensors, weights(0))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_move_that_was_interrupted_is_made_good(world, monkeypatch, asynchronous):
    _, publisher, subscriber = world
    publisher.publish(weights(1))
    publisher.flush()

    def interrupted(*_):
        raise KeyboardInterrupt

    async def follow():
        return await anext(subscriber.follow_async())

    with monkeypatch.context() as patch:
        patch.setattr(subscriber.mirror, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subscriber.advance()
    assert (asyncio.run(follow()) if asynchronous else next(subscriber.follow())) == 1
    assert same_bits(subscriber.mirror.tensors, weights(1))


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
        subscriber.wait_for(1, timeout_s=120)
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
