"""Readers of a run's events read each once, and list nothing that grows with them."""

from __future__ import annotations

from numbered_events import numbered_event

from deltawire.errors import RetryError
from deltawire.events import encode_lines
from deltawire.rl.evaluate.evaluator import evaluated_versions
from deltawire.runtime import event_cursor, event_tail
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.process import Process
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys


def put(bucket, stream, number):
    bucket.put(keys.events(stream, number), encode_lines([numbered_event(stream, number)]))


def read(tail):
    return [(event.process, event.version) for event in tail.read()]


def test_each_segment_is_read_once_and_new_streams_are_found(monkeypatch):
    monkeypatch.setattr(event_tail, "LIST_EVERY_S", 0.0)
    monkeypatch.setattr(event_cursor, "LISTING_PAUSE", 0.0)
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    tail = EventTail(bucket)
    assert read(tail) == []
    for number in range(3):
        put(bucket, "w0-a", number)
    assert read(tail) == [("w0-a", 0), ("w0-a", 1), ("w0-a", 2)]
    put(bucket, "w0-a", 3)
    put(bucket, "w1-b", 0)
    bucket.put("events/not a stream/0000000000.jsonl", b"{}")
    assert read(tail) == [("w0-a", 3), ("w1-b", 0)]
    assert read(tail) == []
    bucket.fail("list", "*", error=lambda verb, key: RetryError("no answer"))
    put(bucket, "w1-b", 1)
    assert read(tail) == []  # It lists the names first, and gets no answer.
    bucket.heal()
    assert read(tail) == [("w1-b", 1)]


class _NoListing(FaultyBucket):
    """A bucket that refuses to list objects."""

    def list_objects(self, prefix, *, after=None):
        raise AssertionError(f"listed {prefix}")


def test_following_lists_no_segments(monkeypatch):
    monkeypatch.setattr(event_tail, "LIST_EVERY_S", 0.0)
    inner = open_bare_bucket("memory://")
    for stream in ("w0-a", "w1-b"):
        for number in range(50):
            put(inner, stream, number)
    tail = EventTail(inner)
    monkeypatch.setattr(inner, "list_objects", _NoListing(inner).list_objects)
    assert len(read(tail)) == 100


def test_an_evaluator_finds_the_versions_that_it_measured_before():
    bucket = open_bare_bucket("memory://")
    for stream, numbers in (("evaluator-a", (0, 4)), ("evaluator-b", (8,)), ("evaluators-c", (9,))):
        for number in numbers:
            put(bucket, stream, number)
    process = Process(bucket, "evaluator", "evaluator", supervised=False)
    assert evaluated_versions(process) == {0, 4, 8}


def test_an_object_that_is_no_segment_is_skipped(monkeypatch):
    """Too large, or no events: what follows is read all the same."""
    monkeypatch.setattr(event_tail, "MAX_SEGMENT_BYTES", 500)
    bucket = open_bare_bucket("memory://")
    put(bucket, "w0-a", 0)
    bucket.put(keys.events("w0-a", 1), b"x" * 501)
    bucket.put(keys.events("w0-a", 2), b"\xff{" * 50)
    put(bucket, "w0-a", 3)
    bucket.put("events/w0-a/stray", b"{}")
    assert read(EventTail(bucket)) == [("w0-a", 0), ("w0-a", 3)]
