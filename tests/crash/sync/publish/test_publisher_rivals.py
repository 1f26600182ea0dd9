"""Two publishers on one run: each version has one author, the other is fenced, nothing forks."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltawire.errors import FencedError, RetryError
from deltawire.store import open_bare_bucket, retrying
from deltawire.sync import read_manifest
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import audit, start_publisher, weights
from deltawire.wire import keys

VERSIONS = 12


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture(params=["folder", "memory"])
def bucket(request, tmp_path):
    location = str(tmp_path) if request.param == "folder" else "memory://"
    bucket = open_bare_bucket(location)
    first = start_publisher(bucket)
    first.publish(weights(0))
    first.close()
    return bucket


def attempt(publisher, tensors):
    """Return whether the version was committed; False if another publisher's was."""
    try:
        publisher.publish(tensors)
        publisher.flush()
    except FencedError:
        return False
    return True


def test_a_race_for_every_version(bucket):
    winners = {}
    barrier = threading.Barrier(2)

    def race(rival):
        bucket_of_mine = FaultyBucket(bucket)
        shaky = random.Random(rival)
        for version in range(1, VERSIONS):
            publisher = start_publisher(bucket_of_mine)
            assert publisher.version == version - 1
            # Lost answers on either side must not make two winners, or none.
            if shaky.random() < 0.5:
                done = shaky.random() < 0.5
                bucket_of_mine.fail("create", "*/manifests/*", done=done)
            barrier.wait()
            if attempt(publisher, weights(version, seed=rival)):
                assert winners.setdefault(version, rival) == rival
            barrier.wait()
            publisher.close()
            bucket_of_mine.heal()

    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(race, rival) for rival in (1, 2)]
        try:
            for running in runs:
                running.result(timeout=120)
        finally:
            barrier.abort()
    assert sorted(winners) == list(range(1, VERSIONS))
    found = audit(bucket, lambda version: weights(version, seed=winners.get(version, 0)))
    assert found == VERSIONS - 1


def test_a_fenced_publisher_stays_fenced_and_harms_nothing(bucket):
    old, new = start_publisher(bucket), start_publisher(bucket)
    assert attempt(new, weights(1))
    stored = {key: bucket.get(key, limit=1 << 20) for key in bucket.list("")}
    for number in range(3):
        assert not attempt(old, weights(1, seed=5 + number))
        assert old.version == 0
    manifests = {key: data for key, data in stored.items() if not key.startswith(keys.BLOBS)}
    for key, data in stored.items():
        assert bucket.get(key, limit=1 << 20) == data
    assert {k for k in bucket.list("") if not k.startswith(keys.BLOBS)} == set(manifests)
    assert attempt(new, weights(2))
    old.close()
    new.close()
    assert audit(bucket, weights) == 2


def test_fenced_after_a_lost_create(bucket):
    """The create failed before it was done, and the rival's came in between."""
    mine = FaultyBucket(bucket)
    ours, theirs = start_publisher(mine), start_publisher(bucket)

    def rival_wins(verb, key):
        assert attempt(theirs, weights(1))
        return RetryError("lost")

    mine.fail("create", "*/manifests/*", error=rival_wins)
    assert not attempt(ours, weights(1, seed=9))
    ours.close()
    theirs.close()
    assert audit(bucket, weights) == 1


def test_not_fenced_after_a_lost_answer(bucket):
    """The create was done, its answer was lost, and the rival tried before the read-back."""
    mine = FaultyBucket(bucket)
    ours, theirs = start_publisher(mine), start_publisher(bucket)

    def rival_tries(verb, key):
        assert not attempt(theirs, weights(1, seed=9))
        return RetryError("lost")

    mine.fail("create", "*/manifests/*", done=True, error=rival_tries)
    assert attempt(ours, weights(1))
    assert attempt(ours, weights(2))
    ours.close()
    theirs.close()
    assert audit(bucket, weights) == 2


def test_fencing_says_what_to_do(bucket):
    old, new = start_publisher(bucket), start_publisher(bucket)
    assert attempt(new, weights(1))
    old.publish(weights(1, seed=3))
    with pytest.raises(FencedError, match="only one trainer") as caught:
        old.flush()
    assert (caught.value.version, caught.value.run) == (1, bucket.url)
    assert caught.value.exit_code == 4
    old.close()
    new.close()
    assert read_manifest(bucket, new.run, 1).epoch == 1
