"""Who follows a run's events reads each once, and asks for no list that grows with them."""

from __future__ import annotations

from deltawire.errors import RetryError
from deltawire.events import Evaluated, encode_lines
from deltawire.rl.evaluate.evaluator import evaluated_versions
from deltawire.runtime import event_cursor as event_series
from deltawire.runtime import event_tail
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.process import Process
from deltawire.store import open_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys


def put(bucket, series, number):
    event = Evaluated(process=series, at=1.0, version=number, accuracy=0.5, problems=1, seconds=1.0)
    bucket.put(keys.events(series, number), encode_lines([event]))


def read(tail):
    return [(event.process, event.version) for event in tail.read()]


def read_all(tail):
    return [(event.process, event.version) for event in tail.read(everything=True)]


def test_each_segment_is_read_once_and_new_series_are_found(monkeypatch):
    monkeypatch.setattr(event_tail, "LIST_EVERY_S", 0.0)
    monkeypatch.setattr(event_series, "PATIENCE", 0.0)
    bucket = FaultyBucket(open_bucket("memory://"))
    tail = EventTail(bucket)
    assert read(tail) == []
    for number in range(3):
        put(bucket, "w0-a", number)
    assert read(tail) == [("w0-a", 0), ("w0-a", 1), ("w0-a", 2)]
    put(bucket, "w0-a", 3)
    put(bucket, "w1-b", 0)
    bucket.put("events/not a series/0000000000.jsonl", b"{}")
    assert read(tail) == [("w0-a", 3), ("w1-b", 0)]
    assert read(tail) == []
    bucket.fail("list", "*", error=lambda verb, key: RetryError("no answer"))
    put(bucket, "w1-b", 1)
    assert read(tail) == []  # It is asked for the names again first, and hears nothing.
    bucket.heal()
    assert read(tail) == [("w1-b", 1)]


class _NoListing(FaultyBucket):
    """A bucket that is asked for names of folders alone."""

    def list_objects(self, prefix, *, after=None):
        raise AssertionError(f"listed {prefix}")


def test_following_lists_no_segments(monkeypatch):
    monkeypatch.setattr(event_tail, "LIST_EVERY_S", 0.0)
    inner = open_bucket("memory://")
    for series in ("w0-a", "w1-b"):
        for number in range(50):
            put(inner, series, number)
    tail = EventTail(inner)
    monkeypatch.setattr(inner, "list_objects", _NoListing(inner).list_objects)
    assert len(read(tail)) == 100


def test_an_evaluator_finds_what_it_measured_before_and_nothing_else():
    bucket = open_bucket("memory://")
    for series, numbers in (("evaluator-a", (0, 4)), ("evaluator-b", (8,)), ("evaluators-c", (9,))):
        for number in numbers:
            put(bucket, series, number)
    process = Process(bucket, "evaluator", "evaluator", supervised=False)
    assert evaluated_versions(process) == {0, 4, 8}


def test_a_segment_that_is_none_is_passed_over(monkeypatch):
    """Too large, or no events: what comes behind it is read all the same."""
    monkeypatch.setattr(event_tail, "MAX_SEGMENT_BYTES", 200)
    bucket = open_bucket("memory://")
    put(bucket, "w0-a", 0)
    bucket.put(keys.events("w0-a", 1), b"x" * 201)
    bucket.put(keys.events("w0-a", 2), b"\xff{" * 50)
    put(bucket, "w0-a", 3)
    bucket.put("events/w0-a/stray", b"{}")
    assert read(EventTail(bucket)) == [("w0-a", 0), ("w0-a", 3)]


def test_who_was_quiet_for_long_is_asked_ever_more_rarely():
    """A thousand series that ended cost a look nothing, and what one of them says comes."""
    now = 0.0
    bucket = FaultyBucket(open_bucket("memory://"))
    for number in range(50):
        put(bucket, f"w{number}-a", 0)
    tail = EventTail(bucket, clock=lambda: now)
    assert len(tail.read()) == 50
    asked = []
    for _ in range(24 * 60):
        now += 60.0
        bucket.operations.clear()
        assert tail.read() == []
        asked.append(sum(verb == "get" for verb, _ in bucket.operations))
    assert sum(asked[-60:]) <= 2 * 50, "once an hour"
    put(bucket, "w7-a", 1)
    assert read_all(tail) == [("w7-a", 1)]
    put(bucket, "w8-a", 1)
    now += event_series.LONGEST_S
    assert read(tail) == [("w8-a", 1)]
