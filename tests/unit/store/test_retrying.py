"""`RetryingBucket`: every verb is repeated, by one policy."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import deltawire
from deltawire.errors import BugError, InputError, RetryError
from deltawire.runtime.signed_bucket import SignedBucket
from deltawire.store import (
    DelegatingBucket,
    MeteredBucket,
    RetryingBucket,
    RetryPolicy,
    open_bare_bucket,
    open_bucket,
    with_retry_policy,
    without_retries,
)
from deltawire.store.retrying import writer_pause_s
from deltawire.sync.chain.gc_intents import delete_blobs
from deltawire.sync.publish.announcement import Announcer, announcing
from deltawire.sync.publish.outage import Outage
from deltawire.testing.faulty import FaultyBucket, disk_full
from deltawire.wire import keys
from deltawire.wire.run import Run

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
        assert without_retries(bare := open_bare_bucket(place, create=True)) is bare


def test_only_the_layers_that_repeat_go():
    bucket, faulty = signed_over_faulty()
    faulty.fail("put", times=1)
    once = without_retries(bucket)
    assert isinstance(once, SignedBucket)
    with pytest.raises(RetryError):
        once.put("a", b"1")
    bucket.put("a", b"1")
    assert faulty.operations == [("put", "a")] * 2


class Prefixed(DelegatingBucket):
    """A layer of a user's: keeps everything below one prefix."""

    def put(self, key, data):
        self.inner.put(f"mine/{key}", data)

    def delete(self, key):
        self.inner.delete(f"mine/{key}")

    def with_inner(self, inner):
        return self._moved(inner)


class Fixed(DelegatingBucket):
    """A layer that does not say how it is moved to other retries."""


@pytest.mark.parametrize("layers", [1, 2], ids=["below", "below-and-above"])
def test_what_must_know_of_each_attempt_goes_through_the_layers_of_a_user(layers):
    faulty = FaultyBucket(open_bare_bucket("memory://"))
    bucket = Prefixed(RetryingBucket(faulty, RetryPolicy(first_pause_s=0.0)))
    once = without_retries(bucket if layers == 1 else RetryingBucket(bucket))
    assert isinstance(once, Prefixed)
    faulty.fail("delete", times=None)
    with pytest.raises(RetryError):
        once.delete("a")
    assert faulty.operations == [("delete", "mine/a")]


def test_deletions_and_announcements_go_through_the_layers_of_a_user():
    run = Run(id="1" * 32, name="r", created_at=0.0, tensors=[], digest="0" * 32)
    faulty = FaultyBucket(open_bare_bucket("memory://"))
    bucket = RetryingBucket(Prefixed(RetryingBucket(faulty)))
    blob = f"{keys.BLOBS}{'a' * 64}"
    assert list(delete_blobs(bucket, run, [blob], set)) == [blob]
    assert ("delete", f"mine/{blob}") in faulty.operations
    announcer = Announcer(bucket, run, epoch=1)
    with announcing(announcer, 1, {}):
        pass
    announcer.close()
    assert ("put", f"mine/{keys.ANNOUNCEMENT}") in faulty.operations
    assert {key[:5] for _, key in faulty.operations} == {"mine/"}


def test_a_layer_that_cannot_be_moved_is_neither_left_out_nor_left_alone():
    for bucket in (
        Fixed(RetryingBucket(open_bare_bucket("memory://"))),
        Fixed(open_bucket("memory://")),
    ):
        with pytest.raises(BugError, match="Fixed has no with_inner"):
            without_retries(bucket)
        with pytest.raises(BugError, match="Fixed has no with_inner"):
            with_retry_policy(bucket, lambda policy: replace(policy, retries=1))
    lone = Fixed(open_bare_bucket("memory://"))
    assert without_retries(RetryingBucket(lone)) is lone
    assert without_retries(lone) is lone


def test_a_meter_counts_on_over_other_retries():
    moved = []
    bucket = MeteredBucket(open_bucket("memory://"), lambda *found: moved.append(found))
    once = without_retries(bucket)
    assert isinstance(once, MeteredBucket)
    assert not isinstance(once.inner, RetryingBucket)
    once.put("a", b"123")
    assert bucket.get("a", limit=9) == b"123"
    assert (
        (bucket.read_bytes, bucket.written_bytes) == (3, 3) == (once.read_bytes, once.written_bytes)
    )
    assert moved == [(0, 3), (3, 0)]


def test_injected_faults_apply_over_other_retries_too():
    faulty = FaultyBucket(open_bucket("memory://"))
    once = without_retries(faulty)
    faulty.fail("put", times=1)
    with pytest.raises(RetryError):
        once.put("a", b"1")
    assert faulty.operations == [("put", "a")]


def test_an_outage_interrupts_the_retries_below_a_meter():
    outage = Outage("memory://", None)
    bucket = outage.over(MeteredBucket(open_bucket("memory://")))
    policy = bucket.inner.policy
    assert policy.sleep == outage.sleep
    assert policy.throttled_s == float("inf")
    assert outage.over(bucket) is bucket


def test_another_policy_reaches_the_retries_below_other_layers():
    bucket, faulty = signed_over_faulty()
    changed = with_retry_policy(bucket, lambda policy: replace(policy, retries=1))
    assert isinstance(changed, SignedBucket)
    faulty.fail("put", times=2)
    with pytest.raises(RetryError):
        changed.put("a", b"1")
    assert with_retry_policy(faulty, lambda policy: policy) is faulty


def test_only_opening_a_bucket_adds_retries():
    found = {
        (str(path.relative_to(SOURCES)), line.strip())
        for path in SOURCES.rglob("*.py")
        if path != SOURCES / "store" / "retrying.py"
        for line in path.read_text().splitlines()
        if re.search(r"RetryingBucket(\.over)?\(", line)
    }
    assert found == {
        ("store/opening.py", "return RetryingBucket.over(bucket)"),
        # The last heartbeat of a process is the only one that nothing follows.
        ("runtime/heartbeat.py", "self._write(RetryingBucket(self._bucket), ended=True)"),
        # A bucket of a test's.
        ("testing/tiny.py", "bucket = RetryingBucket(bucket)"),
    }
