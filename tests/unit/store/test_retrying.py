"""`RetryingBucket`: every verb is repeated, by one policy."""

import pytest

from deltawire.errors import InputError, RetryError
from deltawire.store import MeteredBucket, RetryingBucket, RetryPolicy, open_bucket
from deltawire.store.retrying import writer_pause_s
from deltawire.testing.faulty import FaultyBucket, disk_full

CALLS = {
    "get": lambda bucket: bucket.get("a/1", limit=9),
    "range": lambda bucket: bucket.read_ranges("a/1", [(0, 2)]),
    "put": lambda bucket: bucket.put("a/1", b"xyz"),
    "create": lambda bucket: bucket.create("a/2", b"xyz"),
    "head": lambda bucket: bucket.head("a/1"),
    "list": lambda bucket: bucket.list("a/"),
    "delete": lambda bucket: bucket.delete("a/1"),
}


@pytest.mark.parametrize("verb", CALLS)
def test_every_verb_is_repeated_and_then_gives_up(verb):
    faulty = FaultyBucket(open_bucket("memory://"))
    faulty.put("a/1", b"xyz")
    pauses = []
    policy = RetryPolicy(retries=3, first_pause_s=1.0, sleep=pauses.append, rng=lambda: 0.5)
    bucket = RetryingBucket(faulty, policy)
    faulty.fail(verb, times=3)
    CALLS[verb](bucket)
    assert pauses == [1.0, 2.0, 4.0]
    faulty.fail(verb, times=4)
    with pytest.raises(RetryError):
        CALLS[verb](bucket)
    assert len(pauses) == 6


def test_refusals_are_not_repeated():
    faulty = FaultyBucket(open_bucket("memory://"))
    faulty.fail("put", times=None, error=disk_full)
    with pytest.raises(InputError):
        RetryingBucket(faulty, RetryPolicy(sleep=lambda _: pytest.fail("slept"))).put("a", b"")


def test_wrapping_twice_does_not_multiply_attempts():
    faulty = FaultyBucket(open_bucket("memory://"))
    faulty.fail("get", times=None)
    policy = RetryPolicy(retries=2, first_pause_s=0.0)
    with pytest.raises(RetryError):
        RetryingBucket(RetryingBucket(faulty), policy).get("a", limit=1)
    assert faulty.operations == [("get", "a")] * 3


def test_a_create_whose_answer_was_lost_finds_its_own_object():
    faulty = FaultyBucket(open_bucket("memory://"))
    faulty.fail("create", done=True)
    bucket = RetryingBucket(faulty, RetryPolicy(first_pause_s=0.0))
    assert bucket.create("a", b"mine") is False
    assert bucket.get("a", limit=9) == b"mine"


def test_over_keeps_a_policy_that_is_already_there():
    faulty = FaultyBucket(open_bucket("memory://"))
    faulty.fail("get", times=None)
    patient = RetryingBucket(faulty, RetryPolicy(retries=1, first_pause_s=0.0))
    metered = MeteredBucket(patient)
    assert RetryingBucket.over(metered) is metered
    with pytest.raises(RetryError):
        RetryingBucket.over(metered).get("a", limit=1)
    assert faulty.operations == [("get", "a")] * 2
    assert isinstance(RetryingBucket.over(faulty), RetryingBucket)


def test_callers_that_were_refused_together_do_not_ask_again_together():
    def pauses_of():
        faulty, pauses = FaultyBucket(open_bucket("memory://")), []
        faulty.fail("put", times=3)
        policy = RetryPolicy(retries=3, first_pause_s=1.0, sleep=pauses.append)
        RetryingBucket(faulty, policy).put("a", b"")
        return tuple(pauses)

    found = {pauses_of() for _ in range(20)}
    assert len(found) == 20
    for pauses in found:
        for pause, longest in zip(pauses, (1.5, 3.0, 6.0), strict=True):
            assert longest / 3 <= pause <= longest


@pytest.mark.parametrize(
    ("refused_s", "pause_s"),
    [(0.0, 0.01), (1.0, 0.03), (4.9, 0.147), (5.0, 0.5), (60.0, 6.0), (3600.0, 120.0)],
)
def test_a_refused_write_waits_a_share_of_the_time_since_it_was_first_refused(refused_s, pause_s):
    assert writer_pause_s(refused_s) == pytest.approx(pause_s)
