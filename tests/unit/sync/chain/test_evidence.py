"""Evidence: one bad answer is asked for again, and what stays unknown is no reason to act."""

from functools import partial

import pytest

from deltawire.errors import CorruptError, RetryError, UnreadableError
from deltawire.store import open_bare_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.sync.chain.evidence import (
    READS,
    Absent,
    Sound,
    Unknown,
    evidence_of,
    listed_twice,
    require_agreed,
    require_evidence,
)
from deltawire.testing.faulty import FaultyBucket, flip_bit, half
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys

KEY = keys.manifest(0)

DAMAGES = {
    "a flipped bit": lambda data: flip_bit(data, 4321),
    "a short body": half,
    "an empty body": lambda data: b"",
    "another object": lambda data: b"{}",
}


@pytest.fixture
def bucket(monkeypatch):
    inner = open_bare_bucket("memory://")
    publisher = start_publisher(inner)
    publisher.publish(weights(0))
    publisher.close()
    found = FaultyBucket(inner)
    monkeypatch.setattr(type(found), "poll_s", 0.0)
    return found


def look(bucket, version=0):
    read = partial(read_manifest, bucket, read_run(bucket.inner), version)
    return evidence_of(bucket, keys.manifest(version), read)


def test_a_sound_read_is_one_request(bucket):
    assert look(bucket).value.version == 0
    assert bucket.operations == [("get", KEY)]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("answers", range(1, READS))
def test_damaged_answers_are_asked_for_again_on_other_connections(
    bucket, damage, answers, monkeypatch
):
    connections = []
    monkeypatch.setattr(bucket.inner, "reconnect", lambda: connections.append(1))
    bucket.damage(KEY, DAMAGES[damage], times=answers)
    assert isinstance(look(bucket), Sound)
    assert len(connections) == answers


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_stays_damaged_is_unknown_and_named(bucket, damage):
    bucket.damage(KEY, DAMAGES[damage])
    found = look(bucket)
    assert isinstance(found, Unknown)
    assert found.error.key == KEY
    assert len(bucket.operations) == READS
    with pytest.raises(UnreadableError, match="so nothing was deleted") as caught:
        require_evidence(bucket, KEY, partial(read_manifest, bucket, read_run(bucket.inner), 0))
    assert (caught.value.key, caught.value.run) == (KEY, "memory://")
    assert isinstance(caught.value, RetryError)
    assert not isinstance(caught.value, CorruptError)  # No `except CorruptError` swallows it.


def test_absent_is_said_twice_by_the_read_and_by_a_listing(bucket):
    assert look(bucket, 7) == Absent()
    wanted = [("get", keys.manifest(7)), ("list", keys.manifest(7))] * 2
    assert bucket.operations == wanted


def test_not_found_once_is_not_absent(bucket):
    answers = [None, read_manifest(bucket, read_run(bucket.inner), 0)]
    assert isinstance(evidence_of(bucket, KEY, lambda: answers.pop(0)), Sound)
    # Also if the listing agrees the first time.
    answers = [None, read_manifest(bucket, read_run(bucket.inner), 0)]
    assert isinstance(evidence_of(bucket, "weights/none", lambda: answers.pop(0)), Sound)


def test_a_listed_object_that_no_read_finds_is_unknown(bucket):
    found = evidence_of(bucket, KEY, lambda: None)
    assert isinstance(found, Unknown)
    assert "a listing shows" in str(found.error)


def test_a_store_that_does_not_answer_is_no_evidence(bucket):
    bucket.fail("get", times=None)
    with pytest.raises(RetryError) as caught:
        look(bucket)
    assert type(caught.value) is RetryError


def test_an_object_without_a_seal_counts_once_two_answers_agree(bucket):
    bucket.put("a", b"one")
    bucket.damage("a", half, times=1)
    assert require_agreed(bucket, "a", limit=9) == b"one"
    bucket.replace("get", "a", answer=lambda _found: None)
    assert require_agreed(bucket, "a", limit=9) == b"one"
    bucket.operations.clear()
    assert require_agreed(bucket, "a", limit=9) == b"one"
    assert bucket.operations == [("get", "a")] * 2
    assert require_agreed(bucket, "b", limit=9) is None
    for at in range(1, 2 * READS, 2):
        bucket.damage("a", half, at=at, times=1)
    with pytest.raises(UnreadableError, match="two answers to the same read differ"):
        require_agreed(bucket, "a", limit=9)


def test_a_short_listing_leaves_nothing_out(bucket):
    listed = bucket.list("weights/")
    bucket.replace("list", "weights/", answer=lambda found: found[:1])
    assert len(listed) > 1
    assert listed_twice(bucket, "weights/") == listed
