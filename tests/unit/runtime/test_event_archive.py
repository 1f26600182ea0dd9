"""Old events move to archives, old archives are deleted, and readers notice neither."""

from datetime import UTC, datetime, timedelta

import pytest
from heartbeats import put_heartbeat
from numbered_events import numbered_event

from deltawire.errors import SignatureError
from deltawire.events import encode_lines
from deltawire.rl.evaluate.evaluator import evaluated_versions
from deltawire.runtime import event_archive
from deltawire.runtime.event_archive import (
    COMPACT_EVERY_S,
    COMPACT_SEGMENTS,
    KEPT_SEGMENTS,
    EventArchiver,
    archived_segments,
)
from deltawire.runtime.event_cursor import QUIET_S
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.process import Process
from deltawire.runtime.retained import RetainedFile, read_retained
from deltawire.store import open_bare_bucket
from deltawire.store.bucket import ObjectMeta
from deltawire.store.delegating import DelegatingBucket
from deltawire.testing.faulty import FaultyBucket, half
from deltawire.wire import keys

DAY_S = 86400.0
SEGMENTS = 2 * COMPACT_SEGMENTS


class AgingBucket(DelegatingBucket):
    """A bucket whose objects are as old as the test says; counts requests."""

    def __init__(self):
        super().__init__(open_bare_bucket("memory://"))
        self.now = 0.0
        self.stored_at = {}
        self.requests = []

    def _call(self, verb, key, operation):
        self.requests.append((verb, key))
        if verb in ("put", "create"):
            self.stored_at.setdefault(key, self.now)
        return operation()

    @property
    def poll_s(self):
        return 0.0

    def list_objects(self, prefix, *, after=None):
        epoch = datetime(2026, 1, 1, tzinfo=UTC)
        return [
            ObjectMeta(one.key, one.bytes, epoch + timedelta(seconds=self.stored_at[one.key]))
            for one in super().list_objects(prefix, after=after)
        ]


@pytest.fixture
def bucket():
    return AgingBucket()


def write(bucket, stream, numbers):
    """One segment a second, whose event tells its number."""
    for number in numbers:
        bucket.put(keys.events(stream, number), encode_lines([numbered_event(stream, number)]))
        bucket.now += 1.0


def archiver_of(bucket, **settings):
    return EventArchiver(bucket, clock=lambda: bucket.now, **settings)


def versions(tail, stream="trainer-n"):
    return [event.version for event in tail.read() if event.process == stream]


@pytest.mark.parametrize("stream", ["trainer-n", "w0-n", "evaluator-n"])
def test_old_segments_of_a_living_stream_are_archived(bucket, stream):
    put_heartbeat(bucket, stream.removesuffix("-n"), role="worker")
    write(bucket, stream, range(SEGMENTS))
    bucket.now += 1000.0
    write(bucket, stream, [SEGMENTS])
    archiver_of(bucket).archive()
    assert len(bucket.list(keys.EVENTS)) == KEPT_SEGMENTS
    bucket.requests.clear()
    tail = EventTail(bucket, clock=lambda: bucket.now)
    assert versions(tail, stream) == [*range(SEGMENTS + 1)]
    assert len(bucket.requests) < 2 * KEPT_SEGMENTS, "a late reader does not read one by one"
    write(bucket, stream, [SEGMENTS + 1])
    assert versions(tail, stream) == [SEGMENTS + 1]


def test_young_segments_few_segments_and_supervisors_stay(bucket):
    write(bucket, "supervisor-n", range(SEGMENTS))
    bucket.now += 1000.0
    write(bucket, "supervisor-n", [SEGMENTS])
    write(bucket, "w0-n", range(COMPACT_SEGMENTS - 1))
    put_heartbeat(bucket, "w0")
    bucket.now += 1000.0
    write(bucket, "trainer-n", range(SEGMENTS))
    archiver_of(bucket).archive()
    assert bucket.list(keys.ARCHIVE) == []


def test_a_reader_that_was_in_the_middle_misses_nothing(bucket):
    """The segments that it comes to next are archived after it looked for new archives."""
    write(bucket, "trainer-n", range(100))
    tail = EventTail(bucket, clock=lambda: bucket.now)
    assert versions(tail) == [*range(100)]
    write(bucket, "trainer-n", range(100, SEGMENTS))
    bucket.now += 1000.0
    write(bucket, "trainer-n", [SEGMENTS])
    bucket.now += 2 * QUIET_S
    get, archiver = bucket.inner.get, archiver_of(bucket)

    def get_then_archive(key, *, limit):
        data = get(key, limit=limit)
        if key == keys.archive(0):
            bucket.inner.get = get
            archiver.archive()
        return data

    bucket.inner.get = get_then_archive
    assert versions(tail) == [*range(100, SEGMENTS + 1)]
    assert versions(tail) == []


def archive_days(bucket, days, **settings):
    """One archive a day."""
    archiver = archiver_of(bucket, **settings)
    for day in days:
        start = day * SEGMENTS
        write(bucket, "trainer-n", range(start, start + SEGMENTS))
        bucket.now = (day + 1) * DAY_S
        write(bucket, "trainer-n", [])
        bucket.stored_at[keys.events("trainer-n", start + SEGMENTS - 1)] = bucket.now
        archiver.archive()


def test_old_archives_are_deleted_and_readers_begin_at_the_floor(bucket):
    archive_days(bucket, range(3), keep_days=1.5)
    assert bucket.list(keys.ARCHIVE) == [keys.archive(1), keys.archive(2)]
    assert read_retained(bucket).archives == 1
    tail = EventTail(bucket, clock=lambda: bucket.now)
    found = versions(tail)
    assert found == [*range(found[0], 3 * SEGMENTS)]
    assert found[0] == SEGMENTS - KEPT_SEGMENTS
    # A name is not used again, also by the next trainer.
    archive_days(bucket, range(3, 5), keep_days=1.5)
    assert bucket.list(keys.ARCHIVE) == [keys.archive(3), keys.archive(4)]
    assert versions(tail) == [*range(3 * SEGMENTS, 5 * SEGMENTS)]


def test_a_reader_that_slept_continues_after_what_was_deleted(bucket):
    archive_days(bucket, range(2))
    tail = EventTail(bucket, clock=lambda: bucket.now)
    versions(tail)
    archive_days(bucket, range(2, 6), keep_days=0.5)
    assert bucket.list(keys.ARCHIVE) == [keys.archive(5)]
    found = versions(tail)
    assert found == [*range(found[0], 6 * SEGMENTS)]


def test_the_floor_is_raised_before_anything_is_deleted(bucket):
    archive_days(bucket, range(3))
    bucket.requests.clear()
    archiver_of(bucket, keep_days=0.5).archive()
    writes = [call for call in bucket.requests if call[0] in ("put", "delete")]
    assert writes == [
        ("put", keys.RETAINED),
        ("delete", keys.archive(0)),
        ("delete", keys.archive(1)),
    ]


def test_a_deletion_that_was_interrupted_is_completed(bucket):
    archive_days(bucket, range(3))
    RetainedFile(bucket).raise_to(archives=2)
    archiver_of(bucket, keep_days=9).archive()
    assert bucket.list(keys.ARCHIVE) == [keys.archive(2)]


def test_a_number_that_anybody_wrote_steers_nothing(bucket):
    for key in (keys.archive(keys.MAX_NUMBER), keys.archive(40), f"{keys.ARCHIVE}x"):
        bucket.put(key, b"junk")
    archive_days(bucket, range(3), keep_days=1.5)
    assert read_retained(bucket).archives == 1
    assert {keys.archive(1), keys.archive(2)} <= set(bucket.list(keys.ARCHIVE))


def test_an_archive_below_a_floor_raised_meanwhile_is_stored_again(bucket):
    """A trainer that was replaced archives under a number that no reader looks at any more."""
    write(bucket, "w0-n", range(3))
    archiver = archiver_of(bucket)
    archiver.archive()
    archiver._next = 0
    RetainedFile(bucket).raise_to(archives=7)
    bucket.now += event_archive.ARCHIVE_AFTER_S
    assert archiver.archive() == 1
    assert bucket.list(keys.EVENTS) == []
    assert [segment.number for segment in archived_segments(bucket)] == [0, 1, 2]


def test_floors_of_several_kinds_do_not_lower_each_other(bucket):
    floors = RetainedFile(bucket)
    floors.raise_to(rollouts=5)
    floors.raise_to(archives=3)
    floors.raise_to(rollouts=4, archives=1)
    assert (read_retained(bucket).rollouts, read_retained(bucket).archives) == (5, 3)


def test_an_evaluator_finds_what_it_measured_in_archives_too(bucket):
    put_heartbeat(bucket, "evaluator", role="evaluator")
    write(bucket, "evaluator-n", range(SEGMENTS))
    write(bucket, "trainer-n", range(SEGMENTS, 2 * SEGMENTS))
    bucket.now += COMPACT_EVERY_S
    write(bucket, "evaluator-n", [SEGMENTS])
    archiver_of(bucket).archive()
    assert bucket.list(keys.ARCHIVE)
    process = Process(bucket, "evaluator", "evaluator", supervised=False)
    assert evaluated_versions(process) == {*range(SEGMENTS + 1)}


def test_a_segment_that_cannot_be_read_is_not_archived_and_raises_an_alarm(bucket):
    """Its answer did not match its signature: it was once archived as empty, and deleted."""
    put_heartbeat(bucket, "w0")
    for stream in ("trainer-n", "w0-n"):
        write(bucket, stream, range(SEGMENTS))
    bucket.now += 1000.0
    for stream in ("trainer-n", "w0-n"):
        write(bucket, stream, [SEGMENTS])
    faulty = FaultyBucket(bucket)
    get, damaged = faulty.get, keys.events("trainer-n", 5)

    def refuse(key, *, limit):
        if key == damaged:
            raise SignatureError("not signed", key=key)
        return get(key, limit=limit)

    faulty.get = refuse
    archiver = archiver_of(bucket)
    archiver._bucket = faulty
    archiver.archive()
    assert damaged in archiver.alarm
    # Segments before it in its stream are archived, and all of the other stream.
    assert bucket.list(f"{keys.EVENTS}trainer-n/")[0] == damaged
    archived = {(one.stream, one.number) for one in archived_segments(bucket)}
    assert archived >= {("trainer-n", number) for number in range(5)}
    assert ("trainer-n", 5) not in archived
    assert ("w0-n", 100) in archived
    faulty.get = get
    bucket.now += COMPACT_EVERY_S
    archiver.archive()
    assert archiver.alarm == ""
    tail = EventTail(bucket, clock=lambda: bucket.now)
    assert versions(tail) == [*range(SEGMENTS + 1)]


def test_one_damaged_answer_to_a_segment_is_asked_for_again(bucket):
    write(bucket, "trainer-n", range(SEGMENTS))
    bucket.now += 1000.0
    write(bucket, "trainer-n", [SEGMENTS])
    faulty = FaultyBucket(bucket)
    faulty.fail("get", keys.events("trainer-n", 5), error=lambda *_: SignatureError("not signed"))
    archiver = archiver_of(bucket)
    archiver._bucket = faulty
    archiver.archive()
    assert archiver.alarm == ""
    tail = EventTail(bucket, clock=lambda: bucket.now)
    assert versions(tail) == [*range(SEGMENTS + 1)]


def test_a_segment_that_is_too_large_is_archived_empty(bucket, monkeypatch):
    """No reader takes it, and the store says twice how large it is."""
    monkeypatch.setattr(event_archive, "TARGET_BYTES", 1000)
    write(bucket, "trainer-n", range(SEGMENTS))
    bucket.put(keys.events("trainer-n", 5), b"x" * 1001)
    bucket.now += 1000.0
    write(bucket, "trainer-n", [SEGMENTS])
    archiver = archiver_of(bucket)
    archiver.archive()
    assert archiver.alarm == ""
    assert not bucket.exists(keys.events("trainer-n", 5))


def test_floors_that_cannot_be_read_stop_the_archiver(bucket):
    archive_days(bucket, [0, 1, 2])
    faulty = FaultyBucket(bucket)
    faulty.damage(keys.RETAINED, half)
    bucket.put(keys.RETAINED, b"{}")
    archiver = archiver_of(bucket, keep_days=1.0)
    archiver._bucket, archiver._floors = faulty, RetainedFile(faulty)
    bucket.now += 10 * DAY_S
    before = bucket.list(keys.ARCHIVE)
    archiver.round()
    assert keys.RETAINED in archiver.alarm
    assert bucket.list(keys.ARCHIVE) == before
