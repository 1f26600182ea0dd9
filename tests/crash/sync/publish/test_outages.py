"""Publishing goes on while the store is away, and nothing but superseded versions is missing."""

import logging
import threading

import numpy as np
import pytest
from outage_clock import OutageClock

from deltawire.errors import InputError, RetryError, UnreadableError
from deltawire.store import RetryingBucket, RetryPolicy, open_bare_bucket
from deltawire.sync import load_mirror, newest_version, read_manifest, read_run
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.publish.outage import WARN_EVERY_S, Outage
from deltawire.testing import tiny
from deltawire.testing.faulty import FaultyBucket, flip_bit, half

QUICK = RetryPolicy(retries=1, sleep=lambda _: None)


@pytest.fixture
def bucket():
    return FaultyBucket(open_bare_bucket("memory://"))


def publisher_of(bucket, **options):
    return tiny.start_publisher(RetryingBucket(bucket, QUICK), **options)


def assert_newest(bucket, version, weights):
    run = read_run(bucket)
    assert newest_version(bucket) == version
    held = load_mirror(bucket, run, at=version).tensors
    assert all((bits == weights[name].reshape(-1)).all() for name, bits in held.items())
    assert check_run(bucket).faults == []


@pytest.mark.parametrize("seconds", [5, 300])
@pytest.mark.parametrize("step", range(1, 5))
@pytest.mark.parametrize("verb", [None, "put", "create"])
def test_an_outage_at_any_step_ends_by_itself(bucket, seconds, step, verb):
    with publisher_of(bucket, max_outage=None) as publisher:
        clock = OutageClock(seconds, bucket.heal)
        publisher.outage.clock, publisher.outage.wait = clock, clock.wait
        publisher.publish(tiny.weights(0), wait=True)
        for version in range(1, 5):
            if version == step:
                bucket.fail(verb, times=None, done=verb == "create")
            publisher.publish(tiny.weights(version))
        publisher.flush()
        assert publisher.outage.seconds == 0
        newest = publisher.version
        superseded = publisher.outage.superseded
    assert newest >= 4 - superseded
    assert_newest(bucket, newest, tiny.weights(4))


def held_up(bucket, publisher, version):
    """Publishes a version while the store is away, and returns once it waits to be tried again."""
    waits = threading.Event()
    real = publisher.outage.wait

    def wait(seconds):
        waits.set()
        real(seconds)

    publisher.outage.wait = wait
    bucket.fail(times=None)
    publisher.publish(tiny.weights(version), metadata={"global_step": version})
    assert waits.wait(60)


def test_a_version_that_waits_is_superseded_by_the_next(bucket):
    with publisher_of(bucket, max_outage=None) as publisher:
        publisher.publish(tiny.weights(0), wait=True)
        for version in range(1, 4):
            held_up(bucket, publisher, version)
            assert publisher.version == 0
        bucket.heal()
        assert publisher.publish(tiny.weights(4), metadata={"global_step": 4}, wait=True) == 1
        assert publisher.outage.superseded == 3
    assert_newest(bucket, 1, tiny.weights(4))
    assert read_manifest(bucket, read_run(bucket), 1).metadata == {"global_step": 4}


def test_tensors_that_are_left_out_keep_what_the_superseded_version_gave(bucket):
    with publisher_of(bucket, max_outage=None) as publisher:
        publisher.publish(tiny.weights(0), wait=True)
        held_up(bucket, publisher, 3)
        bucket.heal()
        norm = {"norm": np.zeros(16, "u4")}
        publisher.publish(norm, partial=True, wait=True)
    assert_newest(bucket, 1, {**tiny.weights(3), **norm})


def test_a_commit_whose_answer_was_lost_is_built_upon(bucket):
    with publisher_of(bucket, max_outage=None) as publisher:
        publisher.publish(tiny.weights(0), wait=True)
        waits = threading.Event()
        publisher.outage.wait = lambda seconds: waits.set() or waits_on.wait(seconds)
        waits_on = publisher.outage._wake
        bucket.fail("create", "weights/manifests/*", times=1, done=True)
        bucket.fail("get", times=None)
        bucket.fail("head", times=None)
        bucket.fail("list", times=None)
        publisher.publish(tiny.weights(1))
        assert waits.wait(60)
        assert newest_version(bucket.inner) == 1
        publisher.publish(tiny.weights(2))
        bucket.heal()
        publisher.flush()
        assert publisher.version == 2
    assert_newest(bucket, 2, tiny.weights(2))


def test_a_limit_ends_the_training_with_the_reason(bucket):
    publisher = publisher_of(bucket, max_outage=120.0)
    clock = OutageClock(0, None)
    publisher.outage.clock, publisher.outage.wait = clock, clock.wait
    publisher.publish(tiny.weights(0), wait=True)
    bucket.fail(times=None)
    publisher.publish(tiny.weights(1))
    with pytest.raises(RetryError, match=r"not answered for 120 s, and max_outage is 120"):
        publisher.flush()
    bucket.heal()
    publisher.publish(tiny.weights(2))
    publisher.close()
    assert_newest(bucket, 1, tiny.weights(2))


def test_one_warning_a_minute(caplog):
    outage = Outage("memory://", None)
    clock = OutageClock(0, None)
    outage.clock, outage.wait = clock, clock.wait
    with caplog.at_level(logging.WARNING):
        while clock.now < 600:
            outage.pause(RetryError("no answer"), 7)
    assert 600 / WARN_EVERY_S - 4 <= len(caplog.records) <= 600 / WARN_EVERY_S + 1
    assert "version 7 is not committed yet" in caplog.text
    outage.end()
    assert "answers again" in caplog.records[-1].message


def test_without_a_limit_set_an_outage_is_the_next_calls_error(bucket):
    publisher = publisher_of(bucket)
    publisher.publish(tiny.weights(0), wait=True)
    bucket.fail("put", times=None)
    publisher.publish(tiny.weights(1))
    with pytest.raises(RetryError):
        publisher.publish(tiny.weights(2))
    bucket.heal()
    publisher.close()


def test_a_run_that_disappeared_is_noticed_before_a_version_counts(bucket):
    publisher = publisher_of(bucket, max_outage=None)
    publisher.publish(tiny.weights(0), wait=True)
    bucket.delete("run.json")
    publisher.publish(tiny.weights(1))
    with pytest.raises(InputError, match=r"run\.json has disappeared"):
        publisher.flush()
    assert publisher.version == 0
    publisher.close()


@pytest.mark.parametrize("answer", [lambda _: None, half, lambda data: flip_bit(data, 801)])
def test_one_damaged_answer_about_the_run_ends_no_publisher(bucket, answer):
    bucket.replace("head", "run.json", answer=lambda _: None)
    with publisher_of(bucket) as publisher:
        bucket.replace("get", "run.json", answer=answer)
        publisher.publish(tiny.weights(0), wait=True)
    assert_newest(bucket, 0, tiny.weights(0))


def test_a_version_waits_while_every_answer_about_the_run_is_damaged(bucket):
    with publisher_of(bucket) as publisher:
        bucket.damage("run.json", half)
        with pytest.raises(UnreadableError):
            publisher.publish(tiny.weights(0), wait=True)
        assert publisher.version == -1
        bucket.heal()
        publisher.publish(tiny.weights(1), wait=True)
    assert_newest(bucket, 1, tiny.weights(1))


def test_another_runs_description_is_noticed_too(bucket):
    publisher = publisher_of(bucket)
    publisher.publish(tiny.weights(0), wait=True)
    other = open_bare_bucket("memory://")
    tiny.start_run(other)
    bucket.put("run.json", other.get("run.json", limit=1 << 20))
    publisher.publish(tiny.weights(1))
    with pytest.raises(InputError, match=r"run\.json"):
        publisher.flush()
    publisher.close()


def test_a_folder_that_disappeared_is_not_created_again(tmp_path):
    folder = tmp_path / "run"
    publisher = tiny.start_publisher(open_bare_bucket(folder, create=True))
    publisher.publish(tiny.weights(0), wait=True)
    folder.rename(tmp_path / "elsewhere")
    publisher.publish(tiny.weights(1))
    with pytest.raises(InputError, match="has disappeared"):
        publisher.flush()
    assert not folder.exists()
    (tmp_path / "elsewhere").rename(folder)
    publisher.publish(tiny.weights(2), wait=True)
    publisher.close()
    assert_newest(open_bare_bucket(folder), 1, tiny.weights(2))
