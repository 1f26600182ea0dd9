"""Segments become few objects, and every reader reads the same rows as before."""

import time

import msgspec
import pytest
from live_answers import NOW, answer, config_of, put_rows, report

from deltawire.errors import UnreadableError
from deltawire.launch.live_compact import compact_run
from deltawire.live.compaction import compactor, maintenance
from deltawire.live.compaction.compactor import KEPT, StreamCompactor
from deltawire.live.compaction.maintenance import MaintenanceThread, gateway_compactors
from deltawire.live.compaction.storing import store_compacted
from deltawire.live.compaction.stream_rows import ServedRows
from deltawire.live.erasure.exporting import export_user
from deltawire.live.erasure.forgetting import forget_user
from deltawire.live.learning.records import COMPACTED_EVERY, LiveRecords
from deltawire.live.release.canary_outcomes import CanaryRecords
from deltawire.live.release.candidate_estimate import RecentAnswers
from deltawire.live.release.live_probes import PlacedRecords
from deltawire.live.release.outcomes import OutcomeRules
from deltawire.runtime.compacted_segments import list_compacted
from deltawire.runtime.trusted import ANY
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.testing.faulty import FaultyBucket, disk_full, flip_bit
from deltawire.testing.tiny import start_run
from deltawire.wire import keys
from deltawire.wire.captures import Capture, decode_rows
from deltawire.wire.compacted import (
    CompactedName,
    NumberedRow,
    decode_compacted,
    encode_compacted,
)
from deltawire.wire.decisions import Decision, ServedVersion

BOB = "b0" * 16
DAY_S = 86400.0


def store(bucket, numbers, *, owners=None, at=lambda n: NOW + n):
    """One answer and one report in each segment."""
    for n in numbers:
        user = (owners or {}).get(n)
        put_rows(
            bucket, n, [answer(n, user=user, at=at(n))], [report(n, user=user, at=at(n))]
        )  # fmt: skip


def compact(bucket, **options):
    streams = [ServedRows(stream) for stream in ("captures", "feedback")]
    return sum(StreamCompactor(bucket, one, "g0", **options).compact() for one in streams)


def objects(bucket, stream="captures"):
    return [
        key
        for place in (keys.LIVE, keys.LIVE_COMPACTED, keys.LIVE_INDEX)
        for key in bucket.list(f"{place}{stream}/")
    ]


def answers_of(bucket):
    records = LiveRecords(bucket)
    records.poll()
    assert records.alarm == ""
    return sorted(int(one, 16) for one in records.answers), records


def test_many_segments_become_few_objects_with_the_same_rows():
    bucket = open_bare_bucket("memory://")
    store(bucket, range(600))
    before = {row.answer: row for row in answers_of(bucket)[1].answers.values()}
    assert compact(bucket) == 2 * (36 + 2)
    # 2 of level 2, 4 of level 1, each with an index, and the newest segments.
    assert len(objects(bucket)) == len(objects(bucket, "feedback")) == 2 * (2 + 4) + KEPT + 8
    numbers, records = answers_of(bucket)
    assert numbers == list(range(600))
    assert records.answers == before
    assert records.counts == {"answers": 600, "reports": 600}
    assert compact(bucket) == 0


def test_a_reader_that_follows_reads_each_row_once_while_segments_move():
    bucket = open_bare_bucket("memory://")
    store(bucket, range(10))
    records = LiveRecords(bucket)
    found = records.poll()
    for start in range(10, 210, 50):
        store(bucket, range(start, start + 50))
        compact(bucket)
        found += records.poll()
    assert found == 2 * 210
    assert sorted(int(one, 16) for one in records.answers) == list(range(210))


def test_a_segment_that_moves_between_a_listing_and_its_read_is_read():
    """A reader that saw the segment listed and found it gone once took it for deleted."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    store(bucket, range(40))
    bucket.pause("get", keys.live_captures("g0", 0), wait=lambda: compact(bucket.inner))
    records = LiveRecords(bucket)
    records.poll()
    records.poll()
    assert records.alarm == ""
    assert sorted(int(one, 16) for one in records.answers) == list(range(40))


def test_a_reader_finds_the_segments_of_a_gateway_that_was_compacted_away():
    bucket = open_bare_bucket("memory://")
    records = LiveRecords(bucket)
    records.poll()
    store(bucket, range(5))
    assert compact(bucket, clock=lambda: 1e12) == 2
    assert not bucket.list(keys.LIVE_CAPTURES)
    for _ in range(COMPACTED_EVERY):
        records.poll()
    assert sorted(int(one, 16) for one in records.answers) == list(range(5))


def test_a_reader_that_first_sees_a_gateway_reads_what_was_compacted_of_it():
    """It had looked for gateways that were compacted away, and would not again for 16 polls, and
    then for segments after the newest only."""
    bucket = open_bare_bucket("memory://")
    records = LiveRecords(bucket)
    records.poll()
    store(bucket, range(40))
    compact(bucket)
    for _ in range(COMPACTED_EVERY + 1):
        records.poll()
    assert sorted(int(one, 16) for one in records.answers) == list(range(40))
    assert records.counts == {"answers": 40, "reports": 40}


def test_a_restarted_decider_reads_the_indexes_of_what_came_before_its_canary():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    for n in range(300):
        put_rows(bucket.inner, n, [answer(n, at=NOW + n, propensity=0.5)])
    compact(bucket.inner)
    rules = OutcomeRules(config_of().live)
    records = CanaryRecords(bucket, rules)
    decision = Decision(
        number=1, run="a" * 32, verdict="canary", serving=ServedVersion(0, "0" * 32),
        candidate=ServedVersion(1, "1" * 32), share=0.5, salt="s", at=NOW, by="x",
    )  # fmt: skip
    records.follow(decision, since=NOW + 1e6)
    del bucket.operations[:]
    records.poll()
    read = [key for verb, key in bucket.operations if verb == "get"]
    assert [key for key in read if key.startswith(keys.LIVE_INDEX)]
    assert not [key for key in read if key.startswith(keys.LIVE_COMPACTED)]
    del bucket.operations[:]
    records.follow(decision, since=NOW + 100)
    records.poll()
    read = [key for verb, key in bucket.operations if verb == "get"]
    assert [key for key in read if key.startswith(keys.LIVE_COMPACTED)]
    assert sorted(int(one, 16) for one in records.answers) == list(range(100, 300))


def test_an_evaluator_reads_the_newest_segments_only():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    store(bucket.inner, range(600))
    compact(bucket.inner)
    records = RecentAnswers(bucket)
    records.poll()
    first = [key for verb, key in bucket.operations if verb == "get" and "captures" in key]
    assert len(first) < 40
    numbers = sorted(int(one, 16) for one in records.answers)
    assert numbers[-64:] == list(range(536, 600))
    assert numbers[0] > 256


def test_probes_name_the_segment_that_an_answer_came_in():
    bucket = open_bare_bucket("memory://")
    store(bucket, range(40))
    compact(bucket)
    records = PlacedRecords(bucket)
    records.poll()
    assert records.places[f"{3:032x}"] == ("g0", 3)


def test_a_user_is_erased_from_every_object_and_others_stay():
    bucket = open_bare_bucket("memory://")
    run = start_run(bucket)
    owners = {3: BOB, 290: BOB, 599: BOB}
    store(bucket, range(600), owners=owners)
    compact(bucket)
    rows = [row for row in export_user(bucket, {BOB}) if row["kind"] == "answer"]
    assert sorted(int(row["answer"], 16) for row in rows) == sorted(owners)
    reading = FaultyBucket(bucket)
    record = forget_user(reading, run, BOB)
    assert (record.answers, record.feedback) == (3, 3)
    reads = [key for _, key in reading.operations if key.startswith(keys.LIVE_COMPACTED)]
    assert len({key for key in reads if "captures/g0/0" in key}) < 8, "segments of others were read"
    for key in bucket.list(""):
        if not key.startswith(keys.LIVE_FORGOTTEN):
            assert BOB.encode() not in bucket.get(key, limit=1 << 28), key
    assert answers_of(bucket)[0] == [n for n in range(600) if n not in owners]
    assert forget_user(bucket, run, BOB).answers == 3


@pytest.mark.parametrize("damage", ["no segment", "another segment"])
def test_a_damaged_segment_stays_and_the_rest_is_compacted(damage):
    bucket = open_bare_bucket("memory://")
    store(bucket, range(60))
    other = bucket.get(keys.live_captures("g0", 4), limit=1 << 20)
    data = b"damaged" if damage == "no segment" else other
    bucket.put(keys.live_captures("g0", 5), data)
    one = StreamCompactor(bucket, ServedRows("captures"), "g0")
    assert one.compact() == 2
    assert bucket.get(keys.live_captures("g0", 5), limit=1 << 20) == data
    assert keys.live_captures("g0", 5) in one.alarm
    records = LiveRecords(bucket)
    records.poll()
    assert keys.live_captures("g0", 5) in records.alarm
    assert sorted(int(a, 16) for a in records.answers) == [n for n in range(60) if n != 5]


def test_a_row_that_nobody_can_read_is_not_moved_among_others():
    """A compacted segment with such a row would be unreadable, and all of its answers lost."""
    bucket = open_bare_bucket("memory://")
    store(bucket, range(60))
    wrong = msgspec.structs.replace(answer(5), logprobs=b"")
    put_rows(bucket, 5, [wrong])
    compact(bucket)
    records = LiveRecords(bucket)
    records.poll()
    assert sorted(int(a, 16) for a in records.answers) == [n for n in range(60) if n != 5]
    assert bucket.exists(keys.live_captures("g0", 5))


def test_old_rows_are_deleted_and_younger_ones_stay():
    bucket = open_bare_bucket("memory://")
    store(bucket, range(300), at=lambda n: NOW + n * DAY_S / 10)
    now = NOW + 30 * DAY_S
    captures = StreamCompactor(bucket, ServedRows("captures"), "g0")
    captures.compact()
    assert captures.expire(now - 20 * DAY_S) > 0
    left = [n for n in answers_of(bucket)[0] if n < 256]
    # Rows go at most a day later than their age says, and never earlier.
    assert set(range(100, 256)) <= set(left)
    assert min(left) > 100 - 10 - 1
    assert captures.expire(now - 20 * DAY_S) == 0
    assert captures.expire(now + DAY_S) > 0
    assert answers_of(bucket)[0] == sorted({*range(284, 300), *range(272, 284)})


def test_few_segments_are_compacted_once_they_are_a_day_old():
    bucket = open_bare_bucket("memory://")
    store(bucket, range(3))
    assert compact(bucket) == 0
    assert compact(bucket, clock=lambda: 1e12) == 2
    assert answers_of(bucket)[0] == [0, 1, 2]
    assert not bucket.list(keys.LIVE_CAPTURES)


def test_large_objects_are_not_merged_further(monkeypatch):
    monkeypatch.setattr(compactor, "FULL_BYTES", 2000)
    monkeypatch.setattr(compactor, "MAX_MERGED_BYTES", 4000)
    bucket = open_bare_bucket("memory://")
    store(bucket, range(300))
    compact(bucket)
    compacted = bucket.list(keys.LIVE_COMPACTED + "captures/")
    sizes = [len(bucket.get(key, limit=1 << 20)) for key in compacted]
    assert max(sizes) < 4500
    assert len(sizes) > 20
    assert answers_of(bucket)[0] == list(range(300))
    assert compact(bucket) == 0


def test_segments_that_an_erasure_put_back_are_counted_once():
    """An erasure that read a segment before it was compacted stores it again without the user."""
    bucket = open_bare_bucket("memory://")
    store(bucket, range(40))
    data = bucket.get(keys.live_captures("g0", 2), limit=1 << 20)
    compact(bucket)
    bucket.put(keys.live_captures("g0", 2), data)
    numbers, records = answers_of(bucket)
    assert numbers == list(range(40))
    assert records.counts["answers"] == 40
    store(bucket, range(40, 400))
    compact(bucket)
    assert answers_of(bucket)[0] == list(range(400))


def test_a_flipped_bit_in_an_object_is_noticed():
    bucket = open_bare_bucket("memory://")
    store(bucket, range(40))
    compact(bucket)
    place = next(iter(list_compacted(bucket, "captures", "g0").segments))
    data = bucket.get(place.key, limit=1 << 20)
    rows = decode_compacted(data, place, run="")
    assert [r.answer for r in decode_rows([one.data for one in rows], Capture, run="", key="")]
    bucket.put(place.key, flip_bit(data, 999))
    records = LiveRecords(bucket)
    records.poll()
    assert place.key in records.alarm
    bucket.put(place.key, data)
    records.poll()
    assert records.alarm == ""
    assert len(records.answers) == 40


def test_maintenance_reports_what_it_cannot_do_and_goes_on():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    store(bucket, range(60))
    bucket.fail("list", "live/index/captures/*", times=1)
    thread = MaintenanceThread(gateway_compactors(bucket, "g0"), {"captures": 1.0})
    thread.turn()
    assert "injected" in thread.alarm
    assert thread.compacted == 2, "feedback is compacted all the same"
    thread.turn()
    assert thread.alarm == ""
    assert thread.compacted == 4
    assert thread.expired == 32, "those of 1970"


def test_an_object_that_cannot_be_read_keeps_no_other_row_beyond_its_age(monkeypatch):
    monkeypatch.setattr(FaultyBucket, "poll_s", 0.0)
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    store(bucket, range(300))
    thread = MaintenanceThread(gateway_compactors(bucket, "g0"), {"captures": 1.0, "feedback": 1.0})
    for one in thread._compactors:
        one.compact()
    listing = list_compacted(bucket, "captures", "g0")
    index, segment = listing.names[0].index_key, listing.names[1].key
    bucket.inner.put(index, b"junk")
    bucket.inner.put(segment, b"junk")
    # The index of a writer that was killed, and of no segment, which cannot be read either.
    lost = CompactedName("captures", "g0", keys.live_compacted_name(0, 1, "0" * 32))
    bucket.inner.put(lost.key, b"junk")
    for one in thread._compactors:
        one._clock = lambda: 1e12
    thread.turn()
    assert "cannot be read" in thread.alarm
    assert bucket.exists(index)
    assert bucket.exists(segment)
    left = list_compacted(bucket, "captures", "g0").segments
    assert {one.key for one in left} == {listing.names[0].key, segment, lost.key}
    assert not list_compacted(bucket, "feedback", "g0").segments


def test_age_is_looked_at_again_for_the_stream_that_failed_only():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    store(bucket, range(60))
    thread = MaintenanceThread(gateway_compactors(bucket, "g0"), {"captures": 1.0, "feedback": 1.0})
    bucket.fail("list", "live/index/captures/*", times=None)
    for _ in range(3):
        thread.turn()
    assert thread.expired == 32
    del bucket.operations[:]
    thread.turn()
    listings = [key for verb, key in bucket.operations if verb == "list"]
    assert listings.count("live/index/feedback/g0/") == 2, "by the compaction alone"


def with_row(bucket, row):
    """Stores an object with a row that a writer of the bucket made."""
    store(bucket, range(40))
    compact(bucket)
    place = CompactedName("captures", "g0", keys.live_compacted_name(0, 1, "0" * 32))
    bucket.put(place.key, encode_compacted(place, [NumberedRow(0, row)]))
    return place


WRONG_ROWS = [b"\xc1", b"", msgspec.msgpack.encode({"user": BOB, "at": float("nan")})]


@pytest.mark.parametrize("row", WRONG_ROWS)
def test_a_row_of_an_object_that_nobody_can_read_ends_no_thread_and_no_erasure(row, monkeypatch):
    bucket = open_bare_bucket("memory://")
    monkeypatch.setattr(type(bucket), "poll_s", 0.0)
    run = start_run(bucket)
    place = with_row(bucket, row)
    with pytest.raises(UnreadableError, match="nothing was deleted") as raised:
        forget_user(bucket, run, BOB)
    assert raised.value.key == place.key
    thread = MaintenanceThread(gateway_compactors(bucket, "g0"), {"captures": 1.0})
    for one in thread._compactors:
        one._clock = lambda: 1e12
    thread.turn()
    assert place.key in thread.alarm
    assert bucket.exists(place.key)
    assert not bucket.list(keys.LIVE_CAPTURES), "the rest is compacted"


@pytest.mark.parametrize("where", ["a segment", "stored"])
def test_what_cannot_be_read_of_one_gateway_keeps_no_other_from_being_compacted(
    where, tmp_path, monkeypatch
):
    monkeypatch.setattr(compactor, "ABANDONED_S", -1e9)
    bucket = open_bare_bucket(str(tmp_path / "run"), create=True)
    start_run(bucket)
    for gateway in ("g0", "g1"):
        for n in range(40):
            put_rows(bucket, n, [answer(n)], gateway=gateway)
    lost = CompactedName("captures", "g0", keys.live_compacted_name(0, 1, "0" * 32))
    if where == "a segment":
        bucket.put(lost.key, b"junk")
    else:
        stores = compactor.store_compacted

        def voided(bucket, rows_of, owner, rows):
            if owner == "g0":
                raise UnreadableError("rows cannot be stored", key=lost.key)
            return stores(bucket, rows_of, owner, rows)

        monkeypatch.setattr(compactor, "store_compacted", voided)
    with pytest.raises(UnreadableError, match="the rest is compacted") as raised:
        compact_run(bucket.url, trust=ANY)
    assert lost.key in str(raised.value)
    assert list_compacted(bucket, "captures", "g1").segments
    left = list(range(15, 40) if where == "a segment" else range(40))
    listed = bucket.list(f"{keys.LIVE_CAPTURES}g0/")
    assert [keys.trailing_number(key) for key in listed] == left


def test_any_error_of_maintenance_is_reported_and_the_thread_goes_on(monkeypatch):
    monkeypatch.setattr(maintenance, "COMPACT_EVERY_S", 0.01)
    bucket = open_bare_bucket("memory://")
    thread = MaintenanceThread(gateway_compactors(bucket, "g0"), {})
    turns = []

    def fails():
        turns.append(1)
        raise ValueError("a defect")

    monkeypatch.setattr(thread._compactors[0], "compact", fails)
    thread.start()
    until = time.monotonic() + 30
    while len(turns) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert thread.is_alive()
    assert len(turns) >= 3
    assert "a defect" in thread.alarm
    thread.close()


@pytest.mark.parametrize("at", range(1, 12))
def test_an_export_during_a_merge_has_every_row(at, monkeypatch):
    """Objects that were listed, and merged before they were read, were left out."""
    monkeypatch.setattr(compactor, "FAN_IN", 2)
    bucket = open_bare_bucket("memory://")
    start_run(bucket)
    store(bucket, range(20), owners=dict.fromkeys(range(4), BOB))
    monkeypatch.setattr(compactor, "FULL_BYTES", 0)
    compact(bucket)
    monkeypatch.setattr(compactor, "FULL_BYTES", 32 << 20)
    left = [at]

    class Merging(DelegatingBucket):
        def _call(self, verb, key, operation):
            if key.startswith((keys.LIVE_COMPACTED, keys.LIVE_INDEX)):
                left[0] -= 1
                if left[0] == 0:
                    compact(bucket)
            return operation()

    rows = [row for row in export_user(Merging(bucket), {BOB}) if row["kind"] == "answer"]
    assert left[0] <= 0
    assert sorted(int(row["answer"], 16) for row in rows) == [0, 1, 2, 3]


def test_rows_of_nobody_are_not_stored():
    bucket = open_bare_bucket("memory://")
    assert store_compacted(bucket, ServedRows("captures"), "g0", []) is None
    assert bucket.list("") == []


def test_a_store_that_refuses_deletions_is_left_as_it_is():
    """Each turn once would have stored all of it again."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    store(bucket, range(60))
    before = bucket.list("")
    bucket.fail("delete", times=None, error=disk_full)
    thread = MaintenanceThread(gateway_compactors(bucket, "g0"), {})
    thread.turn()
    assert "cannot delete" in thread.alarm
    assert bucket.list("") == before
