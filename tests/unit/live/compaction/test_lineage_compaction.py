"""Lineages become few objects, and every reader reads the same ones as before."""

import msgspec
import pytest
from live_answers import NOW
from stored_lineages import (
    compact_lineages,
    lineage_of,
    merge_early,
    put_checkpoint,
    put_lineage,
    start_settled,
)

from deltawire.config import parse_config
from deltawire.errors import InputError, UnreadableError
from deltawire.launch.live_compact import compact_run
from deltawire.live.compaction import maintenance
from deltawire.live.compaction.compactor import KEPT, StreamCompactor
from deltawire.live.compaction.lineage_rows import LineageRows, settled_below
from deltawire.live.compaction.maintenance import MaintenanceThread, learner_compactor
from deltawire.live.erasure.exporting import export_user
from deltawire.live.learning.owners import OtherLineages
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineage, read_lineages, require_lineages
from deltawire.runtime.compacted_segments import list_compacted, stored_owners
from deltawire.runtime.trusted import ANY
from deltawire.store import DelegatingBucket, open_bucket
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.wire import keys
from deltawire.wire.roles import role_for

BOB = "b0" * 16
DAY_S = 86400.0


def users_of(sequence):
    """Four users, of whom Bob is in every 50th group."""
    others = [f"{256 * sequence + n:032x}" for n in range(4)]
    return [BOB, *others[1:]] if sequence % 50 == 7 else others


@pytest.fixture
def bucket():
    bucket = open_bucket("memory://")
    for n in range(300):
        put_lineage(bucket, lineage_of(n, users_of(n), at=NOW + n), group=False)
    put_checkpoint(bucket, 4, {"live": 290})
    return bucket


def objects(bucket):
    return [
        key
        for place in (keys.LIVE, keys.LIVE_COMPACTED, keys.LIVE_INDEX)
        for key in bucket.list(f"{place}lineage/")
    ]


def test_many_lineages_become_few_objects_with_the_same_content(bucket):
    before = read_lineages(bucket)
    assert compact_lineages(bucket) == 17 + 1
    assert len(objects(bucket)) < 60
    assert read_lineages(bucket) == before
    mine = require_lineages(bucket, users=[BOB])
    assert [one.sequence for one in mine] == [n for n in range(300) if n % 50 == 7]
    for n in (0, 7, 271, 272, 299):
        assert read_lineage(bucket, "live", n) == before[n]
    assert read_lineage(bucket, "live", 300) is None
    assert read_lineage(bucket, "other", 0) is None
    learned = [row for row in export_user(bucket, [BOB]) if row["kind"] == "learned"]
    assert [row["sequence"] for row in learned] == [one.sequence for one in mine]
    assert compact_lineages(bucket) == 0


def test_an_erasure_reads_only_what_holds_the_user(bucket):
    compact_lineages(bucket)
    watched = FaultyBucket(bucket)
    nobody = "e0" * 16
    assert require_lineages(watched, users=[nobody]) == []
    read = [key for verb, key in watched.operations if verb == "get"]
    assert not [key for key in read if key.startswith(keys.LIVE_COMPACTED)]
    assert len(watched.operations) < 100, "of 300 lineages"


def test_only_lineages_of_groups_that_a_checkpoint_settled_are_compacted(bucket):
    put_checkpoint(bucket, 5, {"live": 40})
    compact_lineages(bucket)
    left = {keys.trailing_number(key) for key in bucket.list(keys.LIVE_LINEAGE)}
    assert left == set(range(32, 300))
    for key in list(bucket.list(keys.CHECKPOINTS)):
        bucket.delete(key)
    assert settled_below(bucket, "live") == 0
    assert compact_lineages(bucket) == 0


@pytest.mark.parametrize("data", [b"", b"{}", b'{"version": 4, "ledger": 3}'])
def test_a_checkpoint_that_cannot_be_read_lets_nothing_be_compacted(bucket, data):
    bucket.put(keys.checkpoint_commit(6), data)
    with pytest.raises(UnreadableError):
        compact_lineages(bucket)
    assert len(objects(bucket)) == 300


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"{}",
        lambda data: data.replace(b'"sequence":3', b'"sequence":4'),
        lambda data: data.replace(b'"worker":"live"', b'"worker":"evil"'),
        lambda data: data[:-9],
    ],
)
def test_a_damaged_lineage_stays_and_the_rest_is_compacted(bucket, damage):
    key = keys.live_lineage("live", 3)
    data = damage(bucket.get(key, limit=1 << 20))
    bucket.put(key, data)
    one = StreamCompactor(bucket, LineageRows(), "live", below=lambda: 290)
    assert one.compact()
    assert key in one.alarm
    assert bucket.get(key, limit=1 << 20) == data
    assert len(read_lineages(bucket)) == 299


def test_a_compacted_segment_with_a_lineage_of_another_group_is_refused(bucket):
    compact_lineages(bucket)
    place = list_compacted(bucket, "lineage", "live").names[0]
    bucket.put(place.key, flip_bit(bucket.get(place.key, limit=1 << 28), 999))
    with pytest.raises(UnreadableError):
        require_lineages(bucket, users=[BOB])
    assert len(read_lineages(bucket)) < 300, "no learner is stopped by it"


class Compacted(DelegatingBucket):
    """Compacts all lineages before the ``at``-th request."""

    def __init__(self, inner, at):
        super().__init__(inner)
        self.left = at

    def _call(self, verb, key, operation):
        self.left -= 1
        if self.left == 0:
            compact_lineages(self.inner, clock=lambda: 1e12)
        return operation()


@pytest.mark.parametrize("reader", ["all", "users", "one"])
@pytest.mark.parametrize("before", [False, True], ids=["keys", "compacted"])
def test_lineages_that_move_while_they_are_read_are_read_nevertheless(reader, before, monkeypatch):
    """From keys into segments, and from segments into larger ones."""
    lineages = [lineage_of(n, [BOB, f"{n:032x}"], at=NOW + n) for n in range(12)]
    each = 1 if before else 3
    at, moved = 1, 0
    while True:
        at += each
        bucket = open_bucket("memory://")
        for one in lineages:
            put_lineage(bucket, one, group=False)
        put_checkpoint(bucket, 4, {"live": 12})
        if before:
            merge_early(monkeypatch, fan_in=4)
            assert compact_lineages(bucket) == 2
        merge_early(monkeypatch)
        watched = Compacted(bucket, at)
        if reader == "all":
            found = read_lineages(watched)
        elif reader == "users":
            found = require_lineages(watched, users=[BOB])
        else:
            found = [read_lineage(watched, "live", n) for n in range(12)]
        assert found == lineages, at
        if watched.left > 0:
            break
        moved += each
    assert moved > 5


def test_a_learner_that_stood_still_reads_what_was_compacted_meanwhile(bucket):
    others = OtherLineages(bucket, "mine")
    for one in read_lineages(bucket)[:20]:
        others.skip(one)
    compact_lineages(bucket)
    assert sorted(one.sequence for one in others.poll()) == list(range(20, 300)), "each once"
    assert list(others.poll()) == []
    put_lineage(bucket, lineage_of(300, users_of(300)))
    assert [one.sequence for one in others.poll()] == [300]


def test_a_learner_reads_a_damaged_segment_again(bucket):
    compact_lineages(bucket)
    faulty = FaultyBucket(bucket)
    faulty.damage(f"{keys.LIVE_COMPACTED}lineage/*", lambda data: flip_bit(data, 999), times=1)
    others = OtherLineages(faulty, "mine")
    first = [one.sequence for one in others.poll()]
    assert len(first) < 300
    again = [one.sequence for one in others.poll()]
    assert sorted(first + again) == list(range(300)), "each once"


def test_a_learner_that_stood_still_for_days_reads_lineages_none_of_which_kept_a_key(bucket):
    """Also those of a learner that it has not met, and after the clock was set back."""
    for moved in (2 * DAY_S, -DAY_S):
        now = [1e9]
        others = OtherLineages(bucket, "mine", clock=lambda now=now: now[0])
        for one in read_lineages(bucket)[:280]:
            others.skip(one)
        put_checkpoint(bucket, 5, {"live": 300, "new": 3})
        for n in range(3):
            put_lineage(bucket, lineage_of(n, users_of(n), worker="new"), group=False)
        for worker in ("live", "new"):
            compact_lineages(bucket, worker, clock=lambda: 1e12)
        assert not bucket.list(keys.LIVE_LINEAGE)
        now[0] += 60
        assert list(others.poll()) == [], "a listing of keys is enough"
        now[0] += moved
        found = [(one.worker, one.sequence) for one in others.poll()]
        wanted = [("live", n) for n in range(280, 300)] + [("new", n) for n in range(3)]
        assert sorted(found) == wanted
        assert list(others.poll()) == []


FOREIGN = [
    *(f"{base}lineage/{name}/x" for base in (keys.LIVE_COMPACTED, keys.LIVE_INDEX)
      for name in ("a b", "@eaDir")),
    f"{keys.LIVE_LINEAGE}a.b/0000000001", f"{keys.LIVE_LINEAGE}live/zz",
    *(f"{keys.LIVE_LINEAGE}live/{name}" for name in
      ("0000000300.tmp", "9999999999.bak")),
    f"{keys.LIVE_COMPACTED}captures/a b/x",
]  # fmt: skip


def test_objects_under_foreign_names_stop_no_reader(bucket):
    """Any writer may store one, and so does a network disk."""
    compact_lineages(bucket)
    others = OtherLineages(bucket, "mine")
    lineage = bucket.get(keys.live_lineage("live", 299), limit=1 << 20)
    for key in FOREIGN:
        bucket.put(key, lineage)
    odd = lineage.replace(b'"worker":"live"', b'"worker":"a b"')
    bucket.put(keys.live_lineage("evil", 0), odd)
    assert len(read_lineages(bucket)) == 300
    assert len(require_lineages(bucket, users=[BOB])) == 6
    assert len(list(others.poll())) == 300
    put_lineage(bucket, lineage_of(300, users_of(300)))
    assert [one.sequence for one in others.poll()] == [300]
    put_lineage(bucket, lineage_of(302, users_of(302)))
    assert [one.sequence for one in others.poll()] == [302]
    LiveRecords(bucket).poll()
    assert {*stored_owners(bucket, "lineage")} == {"live", "evil"}
    for kind in ("captures", "feedback"):
        assert stored_owners(bucket, kind) == []


def test_old_lineages_are_deleted_once_nothing_of_their_group_is_left(bucket):
    bucket.put(keys.rollout("live", 3), b"group")
    bucket.put(keys.reference("live", 5), b"scores")
    bucket.put(keys.proof_salt("live", 8), b"salt")
    compact_lineages(bucket)
    one = StreamCompactor(bucket, LineageRows(), "live")
    assert one.expire(NOW + 100 - DAY_S) == 0
    assert one.expire(NOW + DAY_S + 100) >= 256 - 3
    left = [found.sequence for found in read_lineages(bucket)]
    assert left[:3] == [3, 5, 8]
    assert left[3:] == list(range(272, 300)), "and those that are not compacted yet"
    bucket.delete(keys.rollout("live", 3))
    assert one.expire(NOW + DAY_S + 100) == 1
    assert read_lineage(bucket, "live", 3) is None


def test_only_lineages_of_that_age_are_deleted():
    bucket = open_bucket("memory://")
    for n in range(80):
        put_lineage(bucket, lineage_of(n, users_of(n), at=NOW + 7200 * n), group=False)
    put_checkpoint(bucket, 4, {"live": 64})
    compact_lineages(bucket)
    one = StreamCompactor(bucket, LineageRows(), "live")
    assert one.expire(NOW + 7200 * 45) == 45
    assert [found.sequence for found in read_lineages(bucket)] == list(range(45, 80))


def test_lineages_stay_as_long_as_their_answers_may_be_chosen():
    def read(days, age_s):
        return parse_config(
            {"name": "x", "retain": {"lineage_days": days}, "live": {"max_age_s": age_s}},
            source="test",
        )

    assert read(7.0, 7 * DAY_S).retain.lineage_days == 7.0
    assert read(0.0, 7 * DAY_S).retain.lineage_days == 0.0
    with pytest.raises(InputError, match=r"live\.max_age_s"):
        read(6.9, 7 * DAY_S)


def test_a_learners_thread_compacts_and_the_command_does_in_unsigned_runs(tmp_path, monkeypatch):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    lineages = [lineage_of(n, users_of(n), at=NOW) for n in range(40)]
    start_settled(bucket, lineages)
    thread = MaintenanceThread([learner_compactor(bucket, "live")], {"lineage": 1.0})
    thread.turn()
    assert (thread.compacted, thread.alarm) == (1, "")
    assert thread.expired == 0, "the groups are stored"
    merge_early(monkeypatch)
    assert compact_run(str(tmp_path / "run"), trust=ANY)["compacted"] > 1
    assert read_lineages(bucket) == lineages
    assert maintenance.days_of(parse_config(
        {"name": "x", "retain": {"lineage_days": 9.0}}, source="test"
    ).retain)["lineage"] == 9.0  # fmt: skip


def test_the_learner_signs_what_it_compacts():
    name = keys.live_compacted_name(0, 15, "0" * 32)
    for place in (keys.live_compacted, keys.live_index, keys.live_compacting):
        assert role_for(place("lineage", "w1", name)) == "worker-w1"
        assert role_for(place("captures", "w1", name)) == "gateway"


def test_two_copies_of_a_lineage_count_once(bucket):
    """An erasure that began before a compaction may have stored it at its key again."""
    compact_lineages(bucket)
    again = msgspec.structs.replace(read_lineage(bucket, "live", 3), rules="0" * 64)
    put_lineage(bucket, again, group=False)
    assert len(read_lineages(bucket)) == 300
    assert read_lineages(bucket)[3].rules == "", "the compacted one counts"
    compact_lineages(bucket, clock=lambda: 1e12)
    assert len(read_lineages(bucket)) == 300
    assert KEPT == 16
