"""The floors of ``retained.json`` never fall, whatever an answer says."""

import pytest

from deltawire.errors import UnreadableError
from deltawire.runtime.retained import RetainedFile, read_retained
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket, flip_bit, half
from deltawire.wire import keys
from deltawire.wire.retained import Retained


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(FaultyBucket, "poll_s", 0.0)
    inner = open_bare_bucket("memory://")
    RetainedFile(inner).raise_to(rollouts=40, archives=7)
    return FaultyBucket(inner)


DAMAGES = {
    "short": half,
    "empty": lambda data: b"",
    "a bit": lambda data: flip_bit(data, 8 * data.index(b"40")),
    "lower": lambda data: data.replace(b"40", b"10"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_damaged_answer_lowers_no_floor(bucket, damage, at):
    bucket.damage(keys.RETAINED, DAMAGES[damage], at=at, times=1)
    RetainedFile(bucket).raise_to(archives=8)
    assert read_retained(bucket.inner) == Retained(rollouts=40, archives=8)


@pytest.mark.parametrize("damage", ["short", "empty"])
def test_a_file_that_cannot_be_read_stops_the_raise(bucket, damage):
    bucket.damage(keys.RETAINED, DAMAGES[damage])
    with pytest.raises(UnreadableError, match="so no floor was raised") as caught:
        RetainedFile(bucket).raise_to(archives=8)
    assert caught.value.key == keys.RETAINED
    assert read_retained(bucket.inner) == Retained(rollouts=40, archives=7)


def test_a_file_that_is_not_found_once_is_there(bucket):
    bucket.replace("get", keys.RETAINED, answer=lambda _: None)
    RetainedFile(bucket).raise_to(archives=8)
    assert read_retained(bucket.inner) == Retained(rollouts=40, archives=8)


def test_a_floor_that_this_process_knows_does_not_fall(bucket):
    floors = RetainedFile(bucket)
    floors.raise_to(rollouts=50)
    bucket.inner.delete(keys.RETAINED)  # By somebody else.
    assert floors.read() == Retained(rollouts=50, archives=7)
    floors.raise_to(archives=8)
    assert read_retained(bucket.inner) == Retained(rollouts=50, archives=8)


def test_raising_again_takes_two_requests(bucket):
    floors = RetainedFile(bucket)
    floors.raise_to(rollouts=41)
    del bucket.operations[:]
    floors.raise_to(rollouts=42)
    assert [verb for verb, _ in bucket.operations] == ["get", "put"]
    floors.raise_to(rollouts=42)
    assert [verb for verb, _ in bucket.operations] == ["get", "put", "get"]


def test_a_floor_that_another_trainer_raised_counts(bucket):
    floors = RetainedFile(bucket)
    floors.raise_to(rollouts=41)
    RetainedFile(bucket.inner).raise_to(archives=9)
    floors.raise_to(rollouts=42)
    assert read_retained(bucket.inner) == Retained(rollouts=42, archives=9)
