"""The probe of create-if-absent: one bad answer decides nothing."""

import pytest

from deltawire.errors import InputError, UnreadableError
from deltawire.store import (
    Bucket,
    check_create_if_absent,
    open_bare_bucket,
    overwrites_on_create,
)
from deltawire.store.probe import PROBES
from deltawire.testing.faulty import FaultyBucket, flip_bit


@pytest.fixture
def good():
    """A remote store that honors If-None-Match."""
    memory = open_bare_bucket("memory://")
    return FaultyBucket(Bucket(memory.store, "s3://good", local=False))


class Overwriting(Bucket):
    """A store that ignores If-None-Match."""

    def create(self, key, data):
        self.put(key, data)
        return True


@pytest.fixture
def overwriting():
    return FaultyBucket(Overwriting(open_bare_bucket("memory://").store, "s3://bad", local=False))


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("get", lambda data: flip_bit(data, 3)),
        ("get", lambda _data: None),
        ("get", lambda _data: b"x" * 100),
        ("create", lambda _made: True),
    ],
)
@pytest.mark.parametrize("at", [1, 2])
def test_a_good_store_is_not_refused_for_one_bad_answer(good, verb, answer, at):
    good.replace(verb, PROBES + "*", at=at, answer=answer)
    check_create_if_absent(good)
    assert good.list("") == []


@pytest.mark.parametrize("at", [1, 2])
def test_a_bad_store_does_not_pass_by_one_bad_answer(overwriting, at):
    overwriting.replace("create", PROBES + "*", at=at, answer=lambda _made: False)
    with pytest.raises(InputError, match="ignores If-None-Match"):
        check_create_if_absent(overwriting)


def test_answers_that_always_contradict_each_other_are_no_wrong_input(good):
    good.damage(PROBES + "*", lambda data: flip_bit(data, 3))
    with pytest.raises(UnreadableError, match="contradict each other"):
        check_create_if_absent(good)


def test_fsck_does_not_write_a_damaged_answer_over_an_object(overwriting, good):
    for bucket in (overwriting, good):
        bucket.put("run.json", b"whole")
        bucket.damage("run.json", lambda data: flip_bit(data, 3), times=1)
        overwrites_on_create(bucket, "run.json")
        assert bucket.get("run.json", limit=9) == b"whole"
    assert overwrites_on_create(overwriting, "run.json")
    good.replace("create", "run.json", answer=lambda _made: True)
    assert not overwrites_on_create(good, "run.json")
