"""A roster that reads what has changed, against one that reads everything at each look."""

from __future__ import annotations

import contextlib
import math
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import CorruptError, RetryError
from deltawire.runtime.object_cache import SETTLED_S, Roster
from deltawire.store import open_bucket
from deltawire.store.bucket import ObjectMeta
from deltawire.testing.faulty import FaultyBucket, half
from deltawire.wire import keys


class CoarseBucket(FaultyBucket):
    """A store whose clock is in the test's hand and knows whole seconds, as S3's does."""

    def __init__(self, inner):
        super().__init__(inner)
        self.now = 5000.25
        self.stamps: dict[str, float] = {}

    def put(self, key, data):
        self.stamps[key] = math.floor(self.now)
        super().put(key, data)

    def list_objects(self, prefix, *, after=None):
        found = super().list_objects(prefix, after=after)
        return [
            ObjectMeta(e.key, e.bytes, datetime.fromtimestamp(self.stamps[e.key], UTC))
            for e in found
        ]


def roster_of(bucket, clock, **options):
    def read(key):
        data = bucket.get(key, limit=100)
        if data is not None and not data.endswith(b"."):
            raise CorruptError("cut short", key=key)
        return data

    return Roster(bucket, keys.FLEET, keys.worker_of, read, clock=clock, **options)


names = st.sampled_from(["a", "b", "c"])
steps = st.one_of(
    st.tuples(st.just("put"), names, st.integers(0, 9)),
    st.tuples(st.just("delete"), names, st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 0.4, 1.0, 10.0]), st.just(0)),
    st.tuples(st.just("look"), st.sampled_from(["", "get", "list", "cut"]), st.integers(1, 3)),
    st.tuples(st.just("jump"), st.sampled_from([-7.0, 3600.0]), st.just(0)),
)


@given(st.lists(steps, max_size=40), st.sampled_from([1, 4]))
@settings(max_examples=150, deadline=None)
def test_what_lies_there_is_what_is_told(script, readers):
    bucket = CoarseBucket(open_bucket("memory://"))
    now = 0.0
    roster = roster_of(bucket, lambda: now, readers=readers)
    for what, which, number in [*script, ("wait", SETTLED_S, 0), ("look", "", 0)]:
        match what:
            case "put":
                bucket.put(keys.heartbeat(which), b"%d." % number)
                now, bucket.now = now + 0.01, bucket.now + 0.01
            case "delete":
                bucket.delete(keys.heartbeat(which))
            case "wait":
                now, bucket.now = now + which, bucket.now + which
            case "jump":
                # Not onto a second that was: the same size put in it again would look the same.
                bucket.now = max(bucket.now + which, max(bucket.stamps.values(), default=0) + 1)
            case "look":
                if which == "cut":
                    bucket.damage("*", half, at=number, times=1)
                elif which:
                    bucket.fail(which, at=number)
                with contextlib.suppress(RetryError):
                    roster.look()
                bucket.heal()
    there = {keys.worker_of(key): bucket.get(key, limit=9) for key in bucket.list(keys.FLEET)}
    assert roster.values == there
    assert roster.names == there.keys()
    assert not roster.errors


def test_a_thousand_that_ended_are_not_read_again():
    bucket = CoarseBucket(open_bucket("memory://"))
    now = 0.0
    for number in range(1000):
        bucket.put(keys.heartbeat(f"w{number}"), b"0.")
    roster = roster_of(bucket, lambda: now)
    for _ in range(2):
        assert len(roster.look()) == 1000
        now, bucket.now = now + SETTLED_S, bucket.now + SETTLED_S
    bucket.operations.clear()
    bucket.put(keys.heartbeat("w7"), b"1.")
    assert roster.look() == {"w7": b"1."}
    assert roster.values["w8"] == b"0."
    assert [verb for verb, _ in bucket.operations] == ["put", "list", "get"]


def test_a_listing_that_takes_long_is_rare_and_who_stirs_is_read_all_the_same():
    bucket = CoarseBucket(open_bucket("memory://"))
    now = 0.0

    def slow():
        nonlocal now
        now += 1.0

    roster = roster_of(bucket, lambda: now)
    for name in ("busy", "done"):
        bucket.put(keys.heartbeat(name), b"0.")
    bucket.pause("list", wait=slow, times=None)
    seen = []
    for beat in range(100):
        bucket.put(keys.heartbeat("busy"), b"%d." % (beat % 10))
        seen.append(roster.look().get("busy"))
        now, bucket.now = now + 1, bucket.now + 1
    lists = sum(verb == "list" for verb, _ in bucket.operations)
    assert lists <= 6
    assert seen == [b"%d." % (beat % 10) for beat in range(100)]


def test_of_too_many_the_newest_are_kept():
    bucket = CoarseBucket(open_bucket("memory://"))
    for number in range(5):
        bucket.put(keys.heartbeat(f"w{number}"), b"0.")
        bucket.now += 1
    roster = roster_of(bucket, lambda: 0.0, most=3)
    roster.look()
    assert (roster.names, roster.left_out) == ({"w2", "w3", "w4"}, 2)
