"""The event log stores every event exactly once; readers skip lines that cannot be decoded."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError, RetryError
from deltawire.events import (
    MAX_LINE,
    Life,
    Span,
    Step,
    WarmStep,
    decode_lines,
    encode_lines,
)
from deltawire.runtime.event_log import EventLog


def warm(step: int) -> WarmStep:
    return WarmStep(process="p", at=1.0, step=step, loss=0.5)


class FakeSegmentStore:
    """A log with a clock and a store of segments that the test controls."""

    def __init__(self, **kwargs):
        self.now = 1000.0
        self.segments: dict[int, bytes] = {}
        self.error: Exception | None = None
        self.done = False
        self.puts = 0
        self.log = EventLog("p", self.put, clock=lambda: self.now, **kwargs)

    def put(self, number, data):
        self.puts += 1
        if self.error is None or self.done:
            self.segments[number] = data
        if self.error is not None:
            raise self.error

    def stored(self):
        return [e for number in sorted(self.segments) for e in decode_lines(self.segments[number])]


def test_nothing_is_stored_before_its_time():
    store = FakeSegmentStore(every_s=1.0)
    store.log.record(warm(0))
    store.now += 0.9
    store.log.record(warm(1))
    assert store.segments == {}
    store.now += 0.1
    store.log.record(warm(2))
    assert list(store.segments) == [0]
    assert store.stored() == [warm(0), warm(1), warm(2)]
    store.log.record(warm(3))
    assert list(store.segments) == [0]


def test_flush_numbers_segments_and_skips_empty_ones():
    store = FakeSegmentStore(every_s=100.0)
    for step in range(3):
        store.log.flush()
        store.log.record(warm(step))
        store.log.flush()
    store.log.flush()
    assert sorted(store.segments) == [0, 1, 2]
    assert store.stored() == [warm(0), warm(1), warm(2)]


@pytest.mark.parametrize("done", [False, True])
def test_a_put_without_an_answer_is_put_again_to_the_byte(done):
    """It may have been stored, and read: what came since goes into the next segment."""
    store = FakeSegmentStore(every_s=100.0)
    store.error, store.done = RetryError("no"), done
    store.log.record(warm(0))
    store.log.flush()
    assert store.puts == 1
    store.log.record(warm(1))
    store.log.flush()
    store.error = None
    store.log.flush()
    assert store.segments == {0: encode_lines([warm(0)]), 1: encode_lines([warm(1)])}
    assert store.stored() == [warm(0), warm(1)]


def test_an_outage_is_asked_after_once_a_period():
    store = FakeSegmentStore(every_s=1.0)
    store.error = RetryError("no")
    for step in range(100):
        store.now += 0.1
        store.log.record(warm(step))
    assert 8 <= store.puts <= 10
    store.error = None
    store.log.flush()
    assert store.stored() == [warm(step) for step in range(100)]


def test_other_errors_pass_through_and_keep_the_events():
    store = FakeSegmentStore(every_s=100.0)
    store.error = InputError("full")
    store.log.record(warm(0))
    with pytest.raises(InputError):
        store.log.flush()
    store.error = None
    store.log.flush()
    assert store.stored() == [warm(0)]


def test_spans_that_touch_are_merged():
    store = FakeSegmentStore(every_s=1000.0)
    store.log.span("wait", 1.0, 2.0)
    store.log.span("wait", 2.004, 3.0)
    store.log.span("wait", 3.01, 4.0)
    store.log.span("sample", 4.0, 5.0)
    store.log.span("wait", 5.0, 6.0)
    assert store.log.span("wait", 7.0, 7.0) == 7.0
    store.log.flush()
    assert [(s.activity, s.start, s.end) for s in store.stored()] == [
        ("wait", 1.0, 3.0), ("wait", 3.01, 4.0), ("sample", 4.0, 5.0), ("wait", 5.0, 6.0),
    ]  # fmt: skip


def test_a_span_is_not_merged_into_what_is_stored():
    store = FakeSegmentStore(every_s=1000.0)
    store.log.span("wait", 1.0, 2.0)
    store.log.flush()
    store.log.span("wait", 2.0, 3.0)
    store.log.flush()
    assert [(s.start, s.end) for s in store.stored()] == [(1.0, 2.0), (2.0, 3.0)]


def test_a_long_merged_span_is_stored_from_time_to_time():
    store = FakeSegmentStore(every_s=1.0)
    start = store.now
    for _ in range(30):
        store.now += 0.1
        start = store.log.span("wait", start)
    store.log.flush()
    spans = store.stored()
    assert 2 <= len(spans) <= 4
    assert (spans[0].start, spans[-1].end) == (1000.0, store.now)
    assert all(a.end == b.start for a, b in pairwise(spans))


def test_a_span_ends_now_by_default():
    store = FakeSegmentStore(every_s=1000.0)
    assert store.log.span("train", 999.0) == 1000.0
    store.log.flush()
    assert store.stored() == [Span(process="p", activity="train", start=999.0, end=1000.0)]


GARBAGE = {
    "nothing": b"",
    "no JSON": b"hello",
    "half a line": encode_lines([warm(1)])[:-5],
    "an unknown event": b'{"event":"party","process":"p"}',
    "a missing field": b'{"event":"warm_step","process":"p"}',
    "a wrong type": b'{"event":"warm_step","process":"p","at":"now","step":1,"loss":1}',
    "a huge integer": encode_lines([warm(1)]).replace(b'"step":1', b'"step":1' + b"0" * 5000),
    "bytes that are no text": b'{"event":"warm_step","process":"\xff","at":1,"step":1,"loss":1}',
    "a lone surrogate": b'{"event":"warm_step","process":"\\ud800","at":1,"step":1,"loss":1}',
    "deep nesting": b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b',"event":"life"}',
    "a list": b"[1,2]",
    "zeros": b"\0" * 50,
}  # fmt: skip


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_lines_are_passed_over(name):
    data = encode_lines([warm(0)]) + GARBAGE[name] + b"\n" + encode_lines([warm(2)])
    assert decode_lines(data) == [warm(0), warm(2)]


def test_a_line_beyond_the_limit_is_passed_over():
    long = msgspec.structs.replace(warm(1), process="p" * MAX_LINE)
    lines = [encode_lines([warm(0)]), msgspec.json.encode(long) + b"\n", encode_lines([warm(2)])]
    assert decode_lines(b"".join(lines)) == [warm(0), warm(2)]
    just = msgspec.structs.replace(warm(1), process="p" * (MAX_LINE - 200))
    assert decode_lines(encode_lines([just])) == [just]


def test_newer_fields_are_ignored():
    line = encode_lines([warm(3)]).replace(b"{", b'{"colour":["red"],', 1)
    assert decode_lines(line) == [warm(3)]


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 500))
def test_any_bytes_are_survived(noise, place):
    data = encode_lines([warm(step) for step in range(4)])
    place = min(place, len(data))
    found = decode_lines(data[:place] + noise + data[place:])
    whole = data[:place].count(b"\n")
    assert found[:whole] == [warm(step) for step in range(whole)]
    assert found[-1:] == [warm(3)] or place > data.rindex(b"\n", 0, -1)


def big_step(groups: int, workers: int = 3) -> Step:
    return Step(
        process="trainer",
        at=1.0,
        version=7,
        groups=groups,
        dropped=0,
        reward_mean=0.5,
        loss=0.0,
        grad_norm=1.0,
        k3=0.0,
        ratio_max=1.0,
        clipped=0.0,
        staleness=[10 + number % 60 for number in range(groups)],
        queued=[10 + number % 7 for number in range(groups)],
        tokens=groups,
        seconds=1.0,
        workers={f"worker-{number:04d}": number + 1 for number in range(workers)},
    )


def test_a_step_of_many_groups_is_read_back_whole():
    step = big_step(16_384)
    line = encode_lines([step])
    assert len(line) <= MAX_LINE
    (found,) = decode_lines(line)
    pairs = list(zip(step.staleness, step.queued, strict=True))
    assert sorted(zip(found.staleness, found.queued, strict=True)) == sorted(pairs)
    assert (found.left_out, found.ages, found.workers) == ({}, [], step.workers)


def test_a_line_that_cannot_hold_everything_counts_what_is_missing():
    step = big_step(16_384, workers=20_000)
    (found,) = decode_lines(encode_lines([step]))
    assert len(found.staleness) == 16_384
    assert found.workers.items() <= step.workers.items()
    assert found.left_out == {"workers": 20_000 - len(found.workers)}
    died = Life(process="w0", at=1.0, role="worker", what="died", detail="é" * MAX_LINE)
    (found,) = decode_lines(encode_lines([died]))
    assert found.detail.endswith("é…")


def test_counts_of_groups_beyond_the_limit_are_not_expanded():
    for number in (10**12, -1):
        step = msgspec.structs.replace(big_step(0), ages=[(1, 1, number)])
        assert decode_lines(encode_lines([step])) == []
