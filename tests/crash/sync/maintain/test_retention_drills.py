"""Retention with publishers that stall and readers that lag: no fork, nothing half, no silence.

The grace period is 0 but where everybody works at once: all others are slower than that.
"""

import random
import threading
from contextlib import suppress

import pytest
from history import LIMIT, follow, snapshot, weights

from deltawire.errors import CorruptError, DeltawireError, FencedError, RetryError
from deltawire.store import open_bare_bucket, retrying
from deltawire.sync import (
    Subscriber,
    find_run,
    load_mirror,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.retention import prune
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import same_bits, start_publisher
from deltawire.wire import keys

STRIDES = (2, 4)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


def publish(bucket, versions, *, seed=0):
    """Publish so many versions after the newest; a rival publishes with another seed."""
    publisher = start_publisher(bucket, anchor_every=3, compaction_strides=STRIDES)
    first = publisher.version + 1
    for version in range(first, first + versions):
        publisher.publish(weights(version, seed=seed if version else 0), metadata={"seed": seed})
    publisher.close()


def prune_all(bucket, *, cutoff=None, grace_s=0.0):
    cutoff = newest_version(bucket) if cutoff is None else cutoff
    return prune(bucket, read_run(bucket), cutoff=cutoff, grace_s=grace_s)


def check(bucket):
    """Versions that are not pruned are whole and of one author each; readers get from the oldest to
    the newest. Returns the newest version.
    """
    bucket = snapshot(bucket)
    run, newest = find_run(bucket), newest_version(bucket)
    manifests = [read_manifest(bucket, run, version) for version in range(newest + 1)]
    assert all(manifest is not None for manifest in manifests), "a gap"
    kept = [manifest.version for manifest in manifests if not manifest.pruned]
    assert kept == list(range(kept[0], newest + 1))
    assert check_run(bucket, deep=False).whole
    epochs = [manifests[version].epoch for version in kept]
    assert epochs == sorted(epochs)

    def expected(version):
        return weights(version, seed=manifests[version].metadata["seed"] if version else 0)

    for version in kept:
        assert same_bits(load_mirror(bucket, run, at=version).tensors, expected(version))
    follow(bucket, kept[0], newest, expected)
    return newest


def operations_of_a_publish():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publish(bucket, 5)
    publisher = start_publisher(bucket, anchor_every=3, compaction_strides=STRIDES)
    bucket.operations.clear()
    publisher.publish(weights(5))
    publisher.close()
    return len(bucket.operations)


def stride_of(kind):
    """Each operation in turn; on the slower store every third, others before it than after."""
    return 3 if kind == "s3" else 1


@pytest.mark.parametrize("kind", ["memory", "folder", "s3"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_publisher_stalled_for_longer_than_retention(new_bucket, kind, done):
    """At each operation of a commit in turn; meanwhile a rival goes on and retention runs twice.

    The stalled publisher stops with an error, and no manifest names what it began to upload.
    """
    fenced = 0
    stride = stride_of(kind)
    for at in range(1 + done * (stride > 1), operations_of_a_publish() + 1, stride):
        inner = new_bucket(kind)
        publish(inner, 5)
        bucket = FaultyBucket(inner)
        stalled = start_publisher(bucket, anchor_every=3)
        reader = load_mirror(inner, read_run(inner))

        def meanwhile(inner=inner):
            publish(inner, 8, seed=1)
            prune_all(inner)
            prune_all(inner)

        bucket.pause(wait=meanwhile, at=at, done=done)
        stalled.publish(weights(5, seed=2), metadata={"seed": 2})
        for _ in range(3):
            try:
                stalled.flush()
                stalled.publish(weights(stalled.version + 1, seed=2), metadata={"seed": 2})
            except FencedError:
                fenced += 1
                break
        with suppress(FencedError):
            stalled.close()
        # Its own version may have been the first; then it is part of the one chain.
        newest = check(inner)
        if newest < 12:
            assert len(bucket.operations) < at  # It had stopped before.
        subscriber = Subscriber(inner, read_run(inner), reader)
        subscriber.advance()
        assert reader.version == newest
    assert fenced > 3 // stride


@pytest.mark.parametrize("kind", ["memory", "s3"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_retention_in_the_middle_of_a_commit(new_bucket, kind, done):
    """Without a rival: uploads that are not committed yet are unreferenced, and old."""
    stride = stride_of(kind)
    for at in range(1 + done * (stride > 1), operations_of_a_publish() + 1, stride):
        inner = new_bucket(kind)
        publish(inner, 5)
        bucket = FaultyBucket(inner)
        publisher = start_publisher(bucket, anchor_every=3, compaction_strides=STRIDES)
        bucket.pause(wait=lambda inner=inner: prune_all(inner), at=at, done=done)
        for version in (5, 6, 7):
            with suppress(DeltawireError):
                publisher.publish(weights(version), metadata={"seed": 0})
                publisher.flush()
        with suppress(DeltawireError):
            publisher.close()
        check(inner)


@pytest.mark.parametrize("lag", range(1, 13))
def test_retention_and_compaction_at_each_step_of_a_reader(lag):
    """A reader of every lag, interrupted at every operation by everybody else at once."""
    original = open_bare_bucket("memory://")
    publish(original, 14)
    run = read_run(original)
    start = load_mirror(original, run, at=13 - lag)
    undisturbed = FaultyBucket(original)
    subscriber = Subscriber(undisturbed, run, start.copy())
    assert subscriber.advance()
    for at in range(1, len(undisturbed.operations) + 1):
        inner = snapshot(original)
        bucket = FaultyBucket(inner)

        def meanwhile(inner=inner):
            publish(inner, 4)
            prune_all(inner, cutoff=16)

        bucket.pause(wait=meanwhile, at=at)
        mirror = start.copy()
        subscriber = Subscriber(bucket, run, mirror)
        for _ in range(30):
            update = None
            # Its planned objects are gone: an error says so, and the next call plans again.
            with suppress(CorruptError):
                update = subscriber.prepare()
            if update is not None:
                subscriber.commit(update)
                assert same_bits(mirror.tensors, weights(mirror.version))
        assert mirror.version == newest_version(inner) == 17


@pytest.mark.parametrize("kind", ["memory", "folder", "s3"])
def test_readers_at_every_lag_while_everybody_works(new_bucket, kind, drill_seed):
    """Threads, and no order among them: a publisher that compacts, retention, and six readers.

    The grace period is a moment, for readers: one that is longer than a fetch.
    """
    grace_s = 1.0
    bucket = new_bucket(kind)
    publish(bucket, 10)
    run = read_run(bucket)
    last = 40 if kind == "s3" else 60
    finished = threading.Event()
    failures = []

    def guarded(work):
        def run_it(*arguments):
            try:
                work(*arguments)
            except BaseException as error:
                failures.append(error)
                finished.set()
                raise

        return run_it

    @guarded
    def publishing():
        publisher = start_publisher(bucket, anchor_every=4, compaction_strides=STRIDES)
        for version in range(publisher.version + 1, last + 1):
            publisher.publish(weights(version), metadata={"seed": 0})
            finished.wait(0.05)
        publisher.close()
        finished.set()

    @guarded
    def retaining():
        while not finished.wait(0.01):
            with suppress(CorruptError, RetryError):
                prune_all(bucket, cutoff=newest_version(bucket) - 3, grace_s=grace_s)

    @guarded
    def reading(number):
        rng = random.Random(f"{drill_seed} {number}")
        subscriber = Subscriber(bucket, run, load_at_any(bucket, run), stepwise=number % 2 == 0)
        while True:
            # Each reader lags differently: it sleeps while versions are committed.
            over = finished.wait(rng.choice([0.0, 0.005, 0.02, 0.1]))
            for _ in range(50):
                update = None
                with suppress(CorruptError):
                    update = subscriber.prepare()
                if update is None:
                    break
                subscriber.commit(update)
                mirror = subscriber.mirror
                assert same_bits(mirror.tensors, weights(mirror.version))
            if over:
                break
        if not failures:
            subscriber.wait_for(last, timeout_s=100)
            assert same_bits(subscriber.mirror.tensors, weights(last))

    def load_at_any(bucket, run):
        while True:
            with suppress(CorruptError):
                return load_mirror(bucket, run)

    threads = [threading.Thread(target=publishing), threading.Thread(target=retaining)]
    threads += [threading.Thread(target=reading, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures
    assert check(bucket) == last
    assert bucket.list(keys.RETENTION_FLOORS), "nothing was pruned"
    if kind != "s3":  # Its clock shows whole seconds: a floor may be too young to be deleted.
        prune_all(bucket, cutoff=last)
        assert len(bucket.list(keys.RETENTION_FLOORS)) <= 1
        assert check(bucket) == last
    assert bucket.get(keys.manifest(0), limit=LIMIT) is not None
