"""`RetryingBucket`: every verb is repeated, by one policy."""

from dataclasses import replace
from pathlib import Path

import pytest

import deltawire
from deltawire.errors import InputError, RetryError
from deltawire.runtime.signed_bucket import SignedBucket
from deltawire.store import (
    MeteredBucket,
    RetryingBucket,
    RetryPolicy,
    open_bare_bucket,
    open_bucket,
    with_policy,
    without_retries,
)
from deltawire.store.retrying import writer_pause_s
from deltawire.testing.faulty import FaultyBucket, disk_full

SOURCES = Path(deltawire.__file__).parent

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
    faulty = FaultyBucket(open_bare_bucket("memory://"))
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
    faulty = FaultyBucket(open_bare_bucket("memory://"))
    faulty.fail("put", times=None, error=disk_full)
    with pytest.raises(InputError):
        RetryingBucket(faulty, RetryPolicy(sleep=lambda _: pytest.fail("slept"))).put("a", b"")


def test_wrapping_twice_does_not_multiply_attempts():
    faulty = FaultyBucket(open_bare_bucket("memory://"))
    faulty.fail("get", times=None)
    policy = RetryPolicy(retries=2, first_pause_s=0.0)
    with pytest.raises(RetryError):
        RetryingBucket(RetryingBucket(faulty), policy).get("a", limit=1)
    assert faulty.operations == [("get", "a")] * 3


def test_a_create_whose_answer_was_lost_finds_its_own_object():
    faulty = FaultyBucket(open_bare_bucket("memory://"))
    faulty.fail("create", done=True)
    bucket = RetryingBucket(faulty, RetryPolicy(first_pause_s=0.0))
    assert bucket.create("a", b"mine") is False
    assert bucket.get("a", limit=9) == b"mine"


def test_over_keeps_a_policy_that_is_already_there():
    faulty = FaultyBucket(open_bare_bucket("memory://"))
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
        faulty, pauses = FaultyBucket(open_bare_bucket("memory://")), []
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


def signed_over_faulty():
    faulty = FaultyBucket(open_bare_bucket("memory://"))
    return SignedBucket(RetryingBucket(faulty, RetryPolicy(first_pause_s=0.0))), faulty


def test_an_opened_bucket_repeats_and_a_bare_one_does_not(tmp_path):
    for place in ("memory://", str(tmp_path / "run"), str(tmp_path / "run/forks/one")):
        assert isinstance(open_bucket(place, create=True), RetryingBucket)
        assert RetryingBucket.beneath(bare := open_bare_bucket(place, create=True)) is bare


def test_only_the_layers_that_repeat_go():
    bucket, faulty = signed_over_faulty()
    faulty.fail("put", times=1)
    once = without_retries(bucket)
    assert isinstance(once, SignedBucket)
    with pytest.raises(RetryError):
        once.put("a", b"1")
    bucket.put("a", b"1")
    assert faulty.operations == [("put", "a")] * 2
    counted = MeteredBucket(bucket)
    assert without_retries(counted) is counted


def test_another_policy_reaches_the_retries_below_other_layers():
    bucket, faulty = signed_over_faulty()
    changed = with_policy(bucket, lambda policy: replace(policy, retries=1))
    assert isinstance(changed, SignedBucket)
    faulty.fail("put", times=2)
    with pytest.raises(RetryError):
        changed.put("a", b"1")
    assert with_policy(faulty, lambda policy: policy) is faulty


def test_only_opening_a_bucket_adds_retries():
    found = {
        (str(path.relative_to(SOURCES)), line.strip())
        for path in SOURCES.rglob("*.py")
        for line in path.read_text().splitlines()
        if "RetryingBucket.over(" in line
    }
    assert found == {("store/opening.py", "return RetryingBucket.over(bucket)")}
