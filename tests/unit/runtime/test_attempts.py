"""Heartbeats and events make one attempt: what beats every second must not wait for a store."""

import pytest

from deltawire.errors import RetryError
from deltawire.runtime.heartbeat import impatient
from deltawire.runtime.process import Process
from deltawire.runtime.reader_report import ReaderReporter
from deltawire.runtime.signed_bucket import SignedBucket
from deltawire.store import RetryingBucket, RetryPolicy, open_bare_bucket
from deltawire.testing.faulty import FaultyBucket


@pytest.fixture
def faulty():
    return FaultyBucket(open_bare_bucket("memory://"))


@pytest.fixture
def opened(faulty):
    """A bucket as a process opens it: signing above retries."""
    return SignedBucket(RetryingBucket(faulty, RetryPolicy(first_pause_s=0.0)))


def puts(faulty):
    return [verb for verb, _ in faulty.operations].count("put")


def test_a_process_stores_its_events_in_one_attempt(opened, faulty):
    process = Process(opened, "w0", "worker", supervised=False)
    faulty.fail("put", times=None)
    process.record_life("started")
    assert puts(faulty) == 1
    faulty.heal()
    process.events.flush()
    assert puts(faulty) == 2


def test_a_heartbeat_makes_one_attempt_and_is_still_signed(opened, faulty):
    quick = impatient(opened)
    assert isinstance(quick, SignedBucket)
    faulty.fail("put", times=None)
    with pytest.raises(RetryError):
        quick.put("heartbeats/w0.json", b"{}")
    assert puts(faulty) == 1


def test_a_report_of_a_reader_makes_one_attempt(opened, faulty):
    reporter = ReaderReporter(opened, "pull")
    faulty.fail("put", times=None)
    assert not reporter._store([])
    assert puts(faulty) == 1
