"""Records leave out damaged segments and lineages, and go on."""

import pytest
from live_answers import answer, config_of, put_rows, report

from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineages
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket, half
from deltawire.wire import keys

NOW = 1_000_000.0


def test_damaged_segments_are_left_out_and_are_the_alarm():
    bucket = open_bare_bucket("memory://")
    put_rows(bucket, 0, [answer(1)], [report(1)])
    bucket.put(keys.live_captures("g0", 1), b"damaged")
    bucket.put(f"{keys.LIVE_CAPTURES}g0/notes.txt", b"no segment")
    put_rows(bucket, 2, [answer(2), answer(1)], [report(1), report(2)])
    records = LiveRecords(bucket)
    assert records.poll() == 4
    assert sorted(records.answers) == [f"{n:032x}" for n in (1, 2)]
    assert records.counts == {"answers": 2, "reports": 2}
    assert keys.live_captures("g0", 1) in records.alarm
    assert records.poll() == 0


@pytest.mark.parametrize("damage", ["damaged", "not found"])
def test_a_segment_that_an_answer_damaged_is_read_by_the_next_poll(damage):
    """It was once passed over for good, and its answers were never learned from."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    put_rows(bucket, 0, [answer(1)], [report(1)])
    put_rows(bucket, 1, [answer(2)], [report(2)])
    key = keys.live_captures("g0", 0)
    if damage == "damaged":
        bucket.damage(key, half, times=1)
    else:
        bucket.replace("get", key, answer=lambda _: None)
    records = LiveRecords(bucket)
    assert records.poll() == 3
    assert key in records.alarm
    assert records.poll() == 1
    assert records.alarm == ""
    assert sorted(records.answers) == [f"{n:032x}" for n in (1, 2)]
    del bucket.operations[:]
    assert records.poll() == 0
    assert not [verb for verb, _ in bucket.operations if verb == "get"]


def test_one_damaged_answer_leaves_no_lineage_out():
    """Its answers would be grouped, and trained on, a second time."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    put_rows(
        bucket,
        0,
        [answer(n) for n in range(1, 5)],
        [report(n, value=float(n % 2)) for n in range(1, 5)],
    )
    records = LiveRecords(bucket)
    records.poll()
    made = LiveGroups(bucket, "live", GroupMaker(config_of(), records), first=0)
    assert made.store("n", NOW + 99)
    bucket.damage(keys.live_lineage("live", 0), half, times=2)
    assert [one.sequence for one in read_lineages(bucket)] == [0]


def test_a_lineage_that_is_damaged_or_misplaced_claims_nothing():
    bucket = open_bare_bucket("memory://")
    numbers = range(1, 5)
    put_rows(
        bucket, 0, [answer(n) for n in numbers], [report(n, value=float(n % 2)) for n in numbers]
    )
    records = LiveRecords(bucket)
    records.poll()
    assert LiveGroups(bucket, "live", GroupMaker(config_of(), records), first=0).store(
        "n", NOW + 99
    )
    key = keys.live_lineage("live", 0)
    bucket.put(keys.live_lineage("live", 1), bucket.get(key, limit=1 << 20))
    bucket.put(keys.live_lineage("live", 2), b"damaged")
    assert [one.sequence for one in read_lineages(bucket)] == [0]


@pytest.mark.parametrize("name", ["0000000000.tmp", "9999999999.bak", "notes.txt"])
def test_foreign_objects_hide_no_later_segment(name):
    bucket = open_bare_bucket("memory://")
    bucket.put(f"{keys.LIVE_CAPTURES}g0/{name}", b"no segment")
    records = LiveRecords(bucket)
    assert records.poll() == 0
    put_rows(bucket, 0, [answer(1)], [])
    assert records.poll() == 1
