"""The faulty bucket, on which every crash test depends."""

import pytest

from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket, disk_full, flip_bit, half


@pytest.fixture
def bucket():
    return FaultyBucket(open_bare_bucket("memory://"))


def test_nth_operation_before_it_is_done(bucket):
    bucket.fail(at=2)
    bucket.put("a", b"1")
    with pytest.raises(RetryError):
        bucket.put("b", b"2")
    bucket.put("c", b"3")
    assert bucket.list("") == ["a", "c"]
    assert bucket.operations == [("put", "a"), ("put", "b"), ("put", "c"), ("list", "")]


def test_nth_operation_after_it_is_done(bucket):
    bucket.fail(done=True)
    with pytest.raises(RetryError):
        bucket.create("a", b"1")
    assert bucket.create("a", b"2") is False
    assert bucket.get("a", limit=1) == b"1"


def test_failing_until_healed(bucket):
    bucket.put("a", b"1")
    bucket.fail(at=2, times=None)
    assert bucket.exists("a")
    for _ in range(5):
        with pytest.raises(RetryError):
            bucket.exists("a")
    bucket.heal()
    assert bucket.exists("a")


def test_by_verb_and_key(bucket):
    bucket.fail("create", "weights/blobs/*", times=2, error=disk_full)
    bucket.put("weights/blobs/x", b"1")
    assert bucket.create("weights/manifests/x", b"1")
    for _ in range(2):
        with pytest.raises(InputError, match="lack of space"):
            bucket.create("weights/blobs/y", b"1")
    assert bucket.create("weights/blobs/y", b"1")


def test_every_verb_can_fail(bucket):
    bucket.put("a", b"1")
    bucket.fail(times=None)
    for call in (
        lambda: bucket.get("a", limit=1),
        lambda: bucket.put("a", b"2"),
        lambda: bucket.create("b", b""),
        lambda: bucket.exists("a"),
        lambda: bucket.list(""),
        lambda: bucket.delete("a"),
    ):
        with pytest.raises(RetryError):
            call()
    bucket.heal()
    assert bucket.list("") == ["a"]
    assert bucket.get("a", limit=1) == b"1"


def test_damage_and_hide_change_answers_only(bucket):
    bucket.put("a/1", b"data")
    bucket.damage("a/*", lambda data: data[:2])
    assert bucket.get("a/1", limit=4) == b"da"
    with pytest.raises(CorruptError):
        bucket.get("a/1", limit=3)
    bucket.hide("a/1")
    assert bucket.get("a/1", limit=4) is None
    assert not bucket.exists("a/1")
    assert bucket.list("a/") == []
    assert bucket.create("a/1", b"other") is False
    bucket.heal()
    assert bucket.get("a/1", limit=4) == b"data"


def test_damage_of_one_answer(bucket):
    bucket.put("a", b"data")
    bucket.damage("a", half, at=2, times=1)
    assert [bucket.get("a", limit=4) for _ in range(3)] == [b"data", b"da", b"data"]


@pytest.mark.parametrize("done", [False, True])
def test_another_writer_acts_during_a_pause(bucket, done):
    """Operations during the pause neither fail nor count."""
    found = []

    def meanwhile():
        found.append(bucket.get("a", limit=1))
        bucket.put("b", b"2")

    bucket.pause("put", wait=meanwhile, done=done)
    bucket.fail(at=2)
    bucket.put("a", b"1")
    assert found == [b"1" if done else None]
    assert bucket.operations == [("put", "a")]
    with pytest.raises(RetryError):
        bucket.list("")
    assert bucket.list("") == ["a", "b"]


def test_listings_in_random_order(bucket):
    keys = [f"a/{number:02}" for number in range(20)]
    for key in keys:
        bucket.put(key, b"")
    bucket.shuffle(seed=3)
    answers = [bucket.list("a/") for _ in range(3)]
    assert all(sorted(answer) == keys for answer in answers)
    assert len({tuple(answer) for answer in [*answers, keys]}) == 4
    bucket.heal()
    assert bucket.list("a/") == keys


def test_flip_bit_changes_exactly_one():
    data = bytes(range(7))
    flipped = {flip_bit(data, number) for number in range(8 * len(data))}
    assert len(flipped) == 8 * len(data)
    for other in flipped:
        assert sum((a ^ b).bit_count() for a, b in zip(data, other, strict=True)) == 1
    assert flip_bit(data, 3) == flip_bit(data, 3 + 8 * len(data))
    assert flip_bit(b"", 3) == b""


def test_answers_of_any_verb_are_replaced_and_the_operation_takes_place(bucket):
    for key in ("a/1", "a/2"):
        bucket.put(key, b"1")
    bucket.replace("list", "a/", answer=lambda found: found[:-1])
    bucket.replace("get", "a/*", at=2, answer=lambda _found: None)
    assert [bucket.list("a/"), bucket.list("a/")] == [["a/1"], ["a/1", "a/2"]]
    assert [bucket.get("a/1", limit=1) for _ in range(3)] == [b"1", None, b"1"]


def test_damage_of_one_verb_only(bucket):
    bucket.put("a", b"ab")
    bucket.damage("a", lambda data: data.upper(), verb="get", times=1)
    assert bucket.read_ranges("a", [(0, 2)]) == [b"ab"]
    assert [bucket.get("a", limit=2), bucket.get("a", limit=2)] == [b"AB", b"ab"]


def test_a_postponed_request_gets_no_answer_and_arrives_later(bucket):
    bucket.put("a", b"1")
    bucket.postpone("delete", "a")
    with pytest.raises(RetryError):
        bucket.delete("a")
    assert bucket.exists("a")
    bucket.delete("a")
    bucket.put("a", b"2")
    assert bucket.deliver() == 1
    assert not bucket.exists("a")
    assert bucket.deliver() == 0
