"""The follower's thread: one update at a time, errors surface, outages pass."""

import threading
import time
from types import SimpleNamespace

import pytest

from deltawire.errors import BugError, CorruptError, ResyncError, RetryError
from deltawire.store import RetryingBucket, open_bare_bucket, retrying
from deltawire.sync import Follower, Subscriber, load_mirror
from deltawire.sync.follow import follower as follower_module
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import same_bits, start_publisher, weights


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def world():
    """A bucket with version 0, its publisher, and a maker of followers that are closed again."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket.inner, anchor_every=100)
    publisher.publish(weights(0))
    publisher.flush()
    followers = []

    def follow(**kwargs):
        subscriber = Subscriber(
            RetryingBucket(bucket), publisher.run, load_mirror(bucket.inner, publisher.run, at=0)
        )
        follower = Follower(subscriber, **kwargs)
        followers.append(follower)
        follower.start()
        return follower

    yield bucket, publisher, follow
    for follower in followers:
        follower.close()
        assert not follower._thread.is_alive()
    publisher.close()


def until(look, timeout_s=120.0):
    """Waits until ``look`` returns something, and returns it."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.002)
    raise AssertionError("it did not come")


def asked(bucket, more):
    """Wait until the bucket has been asked ``more`` times from now."""
    count = len(bucket.operations) + more
    until(lambda: len(bucket.operations) >= count)


def test_take_and_commit(world):
    bucket, publisher, follow = world
    follower = follow()
    asked(bucket, 2)
    assert follower.poll() is None
    for version in (1, 2, 3):
        publisher.publish(weights(version))
    publisher.flush()
    for version in (1, 2, 3):
        update = until(follower.poll)
        assert (update.base, update.version) == (version - 1, version)
        # One at a time: nothing more is handed out, or asked for, before the commit.
        before = len(bucket.operations)
        time.sleep(0.05)
        assert follower.poll() is None
        assert len(bucket.operations) == before
        assert follower._steps.mirror.version == version - 1
        follower.commit(update)
        assert same_bits(follower._steps.mirror.tensors, weights(version))
    asked(bucket, 2)
    assert follower.poll() is None


def test_an_error_surfaces_and_stays(world):
    bucket, publisher, follow = world
    publisher.publish(weights(1))
    publisher.flush()
    bucket.damage("weights/blobs/*", lambda data: data[:-1])
    follower = follow(damage_patience_s=0.05)
    until(lambda: not follower._thread.is_alive())
    for _ in range(2):
        with pytest.raises(CorruptError, match="blob"):
            follower.poll()


def test_an_outage_passes(world):
    bucket, publisher, follow = world
    bucket.fail(times=None)
    follower = follow()
    publisher.publish(weights(1))
    asked(bucket, 3 * (retrying.RETRIES + 1))
    assert follower.poll() is None
    bucket.heal()
    update = until(follower.poll)
    bucket.fail(times=None)
    follower.commit(update)
    publisher.publish(weights(2))
    asked(bucket, 3 * (retrying.RETRIES + 1))
    bucket.heal()
    follower.commit(until(follower.poll))
    assert same_bits(follower._steps.mirror.tensors, weights(2))


def test_patience_ends(world):
    bucket, _, follow = world
    bucket.fail(times=None)
    follower = follow(patience_s=0.1)
    until(lambda: not follower._thread.is_alive())
    with pytest.raises(RetryError):
        follower.poll()


def test_the_serving_threads_own_time_is_not_an_outage(world, monkeypatch):
    bucket, publisher, follow = world
    ahead_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(follower_module, "time", clock)
    publisher.publish(weights(1))
    publisher.publish(weights(2))
    publisher.flush()
    follower = follow(patience_s=300.0)
    update = until(follower.poll)
    ahead_s[0] = 400.0
    # A hiccup longer than one round of retries, far shorter than the patience.
    bucket.fail(times=retrying.RETRIES + 2)
    follower.commit(update)
    assert until(follower.poll).version == 2


def test_any_other_error_surfaces_too(world):
    bucket, publisher, follow = world
    publisher.publish(weights(1))
    publisher.flush()

    def out_of_memory(data):
        raise MemoryError("no room")

    bucket.damage("*", out_of_memory)
    follower = follow()
    until(lambda: not follower._thread.is_alive())
    with pytest.raises(BugError, match="MemoryError: no room") as caught:
        follower.poll()
    assert isinstance(caught.value.__cause__, MemoryError)


@pytest.mark.parametrize("waiting_for", ["a version", "a commit", "the store"])
def test_close_ends_it_at_once(world, waiting_for, monkeypatch):
    bucket, publisher, follow = world
    if waiting_for == "a commit":
        publisher.publish(weights(1))
        publisher.flush()
    if waiting_for == "the store":
        monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.05)
        bucket.fail(times=None)
    follower = follow()
    if waiting_for == "a commit":
        until(lambda: follower._update)
    else:
        until(lambda: bucket.operations)
    follower.close()
    assert not follower._thread.is_alive()
    follower.close()


def test_each_update_is_staged_once_before_it_is_handed_out(world):
    _, publisher, follow = world
    staged = []
    follower = follow(stage=lambda update: staged.append((update, threading.current_thread())))
    for version in (1, 2):
        publisher.publish(weights(version))
        publisher.flush()
        update = until(follower.poll)
        assert len(staged) == version
        assert staged[-1] == (update, follower._thread)
        follower.commit(update)


@pytest.mark.parametrize(
    ("error", "raised"), [(ResyncError("no"), ResyncError), (KeyError("no"), BugError)]
)
def test_what_staging_fails_with_is_raised_and_nothing_handed_out(world, error, raised):
    _, publisher, follow = world

    def stage(update):
        raise error

    follower = follow(stage=stage)
    publisher.publish(weights(1))
    publisher.flush()
    until(lambda: not follower._thread.is_alive())
    with pytest.raises(raised):
        follower.poll()


def test_close_before_start():
    follower = Follower(Subscriber(open_bare_bucket("memory://"), None, None))
    follower.close()
    assert follower.poll() is None


@pytest.mark.parametrize("raised", [SystemExit("out"), KeyboardInterrupt(), GeneratorExit()])
def test_what_is_no_exception_surfaces_too(world, raised):
    """A client library once ended the thread with a BaseException, and serving stayed old."""
    _, publisher, follow = world

    def stage(update):
        raise raised

    follower = follow(stage=stage)
    publisher.publish(weights(1))
    publisher.flush()
    until(lambda: not follower._thread.is_alive())
    with pytest.raises(BugError, match=type(raised).__name__):
        follower.poll()


def test_polling_raises_the_error_of_a_dead_thread(world, monkeypatch):
    _, _, follow = world
    monkeypatch.setattr(Follower, "_run", lambda self: None)
    follower = follow()
    until(lambda: not follower._thread.is_alive())
    with pytest.raises(BugError, match="ended"):
        follower.poll()


def test_a_damaged_answer_does_not_end_a_reader(world):
    """The blob is whole; what a cache or a proxy returned for it a few times was not."""
    bucket, publisher, follow = world
    bucket.damage("weights/blobs/*", lambda data: data[:-1], times=3)
    publisher.publish(weights(1))
    publisher.flush()
    assert until(follow().poll).version == 1
