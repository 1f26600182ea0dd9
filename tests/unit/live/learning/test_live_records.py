"""Records leave out damaged segments and lineages, and go on."""

from live_answers import answer, config_of, put_rows, report

from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords, read_lineages
from deltawire.store import open_bucket
from deltawire.wire import keys

NOW = 1_000_000.0


def test_damaged_segments_are_counted_and_left_out():
    bucket = open_bucket("memory://")
    put_rows(bucket, 0, [answer(1)], [report(1)])
    bucket.put(keys.live_captures("g0", 1), b"damaged")
    bucket.put(f"{keys.LIVE_CAPTURES}g0/notes.txt", b"no segment")
    put_rows(bucket, 2, [answer(2), answer(1)], [report(1), report(2)])
    records = LiveRecords(bucket)
    assert records.poll() == 4
    assert sorted(records.answers) == [f"{n:032x}" for n in (1, 2)]
    assert records.counts == {"answers": 2, "reports": 2, "damaged_segments": 1}
    assert records.poll() == 0


def test_a_lineage_that_is_damaged_or_misplaced_claims_nothing():
    bucket = open_bucket("memory://")
    numbers = range(1, 5)
    put_rows(bucket, 0, [answer(n) for n in numbers], [report(n) for n in numbers])
    records = LiveRecords(bucket)
    records.poll()
    assert LiveGroups(bucket, "live", GroupMaker(config_of(), records), first=0).store(
        "n", NOW + 99
    )
    key = keys.live_lineage("live", 0)
    bucket.put(keys.live_lineage("live", 1), bucket.get(key, limit=1 << 20))
    bucket.put(keys.live_lineage("live", 2), b"damaged")
    assert [one.sequence for one in read_lineages(bucket)] == [0]
