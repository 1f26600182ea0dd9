"""Ranks that write separately: one manifest commits all of them, or none."""

import threading

import pytest
from shard_ranks import RANKS, close, publish_all, rank_publisher, shards

from deltawire.errors import FencedError, InputError, ResyncError, RetryError
from deltawire.store import open_bare_bucket, retrying
from deltawire.store.request_limit import note_refusal
from deltawire.sync import Subscriber, load_mirror, newest_version
from deltawire.sync.publish.encoding import chunks_of
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import audit, same_bits, start_publisher, start_run, weights
from deltawire.wire import keys

LAST = 4


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def bucket():
    return FaultyBucket(open_bare_bucket("memory://"))


def test_one_manifest_commits_all(bucket):
    publishers = [rank_publisher(bucket, rank, blob_bytes=60) for rank in range(RANKS)]
    for version in range(LAST + 1):
        assert publish_all(publishers, version) == [None] * RANKS
        assert {p.version for p in publishers} == {version}
        assert len({p.digest for p in publishers}) == 1
    close(publishers)
    assert audit(bucket, weights) == LAST
    assert not bucket.list(keys.PARTS)
    run = start_run(bucket)
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=0), stepwise=True)
    for version in range(1, LAST + 1):
        subscriber.commit(subscriber.prepare())
        assert same_bits(subscriber.mirror.tensors, weights(version))
    # A whole publisher takes the run over, and hands it back to ranks.
    whole = start_publisher(bucket)
    whole.publish(weights(LAST + 1))
    whole.close()
    again = [
        rank_publisher(bucket, r, version=LAST + 1, digest=whole.digest, session="s1", epoch=2)
        for r in range(RANKS)
    ]
    assert publish_all(again, LAST + 2) == [None] * RANKS
    close(again)
    assert audit(bucket, weights) == LAST + 2


@pytest.mark.parametrize("missing", range(RANKS))
def test_without_one_rank_nothing_is_committed(bucket, missing):
    publishers = [rank_publisher(bucket, rank) for rank in range(RANKS)]
    assert publish_all(publishers, 0) == [None] * RANKS
    for publisher in publishers:
        publisher._timeout_s = 0.1
    present = [p for p in publishers if p.rank != missing]
    errors = publish_all(present, 1)
    assert all(isinstance(error, RetryError) for error in errors)
    assert newest_version(bucket) == 0
    assert {p.version for p in publishers} == {0}
    # The session is over: every later call raises.
    with pytest.raises(RetryError):
        present[0].publish(shards(1, present[0].rank))
    digest = publishers[0].digest
    close(publishers)
    again = [
        rank_publisher(bucket, r, version=0, digest=digest, session="s1", epoch=1)
        for r in range(RANKS)
    ]
    assert publish_all(again, 1) == [None] * RANKS
    close(again)
    assert audit(bucket, weights) == 1


@pytest.mark.parametrize(("limit", "value"), [("MAX_PIECES", 9), ("MAX_BLOBS", 2)])
def test_more_than_readers_take_is_not_committed(bucket, monkeypatch, limit, value):
    """Each rank keeps the limits, but all of them together do not."""
    monkeypatch.setattr(f"deltawire.wire.payload.{limit}", value)
    publishers = [rank_publisher(bucket, rank, timeout_s=0.2) for rank in range(RANKS)]
    errors = publish_all(publishers, 0)
    assert "the most is" in str(errors[0])
    assert isinstance(errors[0], InputError)
    assert newest_version(bucket) is None
    close(publishers)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_refuses_tells_the_others_at_once(bucket, monkeypatch, rank):
    """They would wait for as long as a rank may take, which is longer than this test may."""
    publishers = [rank_publisher(bucket, r, timeout_s=3600) for r in range(RANKS)]
    assert publish_all(publishers, 0) == [None] * RANKS

    def refuse():
        raise InputError("planted\x1b[31m")

    monkeypatch.setattr(publishers[rank]._writer, "encode", refuse)
    errors = publish_all(publishers, 1)
    assert errors[rank].message == "planted\x1b[31m"
    for other in {*range(RANKS)} - {rank}:
        assert isinstance(errors[other], ResyncError)
        assert f"rank {rank} refused this version: 'InputError: planted" in errors[other].message
        assert "\x1b" not in errors[other].message
    close(publishers)
    assert newest_version(bucket) == 0


def test_a_rank_waits_for_a_leader_whose_writes_are_refused(bucket, monkeypatch):
    """Its reads are not refused. So it writes its part again, and waits while that is."""
    monkeypatch.setattr("deltawire.store.request_limit._REFUSED", {})  # Other tests' store too.
    rank = rank_publisher(bucket, 1, timeout_s=0.1)
    create, attempts = rank._create_part, []

    def refused(key, part):
        attempts.append(key)
        create(key, part)
        if 1 < len(attempts) < 5:
            note_refusal(bucket.url)

    monkeypatch.setattr(rank, "_create_part", refused)
    (error,) = publish_all([rank], 0)
    assert isinstance(error, RetryError)
    assert "the manifest did not appear" in error.message
    assert len(attempts) == 5, "its part, three attempts that were refused, and one that was not"
    assert len(set(attempts)) == 1
    close([rank])


def test_a_leader_that_refuses_the_merged_version_tells_the_others(bucket, monkeypatch):
    monkeypatch.setattr("deltawire.wire.payload.MAX_PIECES", 12)
    publishers = [rank_publisher(bucket, rank, timeout_s=3600) for rank in range(RANKS)]
    errors = publish_all(publishers, 0)
    assert all("the most is" in str(error) for error in errors)
    close(publishers)


@pytest.mark.parametrize("junk", [b"", b"{}", b"x" * (1 << 15)])
def test_a_refusal_that_nobody_sealed_is_passed_over(bucket, junk):
    bucket.put(keys.refusal(0, "s0"), junk)
    publishers = [rank_publisher(bucket, rank) for rank in range(RANKS)]
    assert publish_all(publishers, 0) == [None] * RANKS
    close(publishers)


def test_ranks_whose_versions_could_have_too_many_pieces_are_refused_at_the_start(
    bucket, monkeypatch
):
    """Not fifty versions later, when delta and anchor are one manifest."""
    monkeypatch.setattr("deltawire.sync.publish.sharded.MAX_PIECES", 12)
    close([rank_publisher(bucket, 0)])
    with pytest.raises(InputError, match=r"may have \d+ pieces; readers accept 12"):
        rank_publisher(bucket, 1)


def test_parts_that_do_not_fit_are_not_committed(bucket):
    def attempt(*publishers):
        for publisher in publishers:
            publisher._timeout_s = 2
        errors = publish_all(publishers, 0)
        close(publishers)
        assert newest_version(bucket) is None
        return str(errors[0])

    wrong = rank_publisher(bucket, 2, session="a")
    writer = wrong._writer
    writer.baseline.starts["embed.weight"] = 0
    writer.staging.starts["embed.weight"] = 0
    writer.chunks = chunks_of(wrong.run, writer.baseline)
    text = attempt(*(rank_publisher(bucket, r, session="a") for r in range(2)), wrong)
    assert "overlap or do not ascend" in text
    others = [rank_publisher(bucket, r, session="b", epoch=int(r == 2)) for r in range(RANKS)]
    assert "epoch" in attempt(*others)
    few = [rank_publisher(bucket, r, session="c", ranks=2) for r in range(2)]
    assert "does not cover" in attempt(*few)


def test_another_publisher_wins(bucket):
    publishers = [rank_publisher(bucket, rank) for rank in range(RANKS)]
    assert publish_all(publishers, 0) == [None] * RANKS
    rival = start_publisher(bucket)
    rival.publish(weights(1))
    rival.close()
    errors = publish_all(publishers, 1, seed=5)
    assert [type(error) for error in errors] == [FencedError] * RANKS, errors
    close(publishers)
    assert audit(bucket, weights) == 1


def test_a_session_is_used_once(bucket):
    publishers = [rank_publisher(bucket, rank) for rank in range(RANKS)]
    publisher = rank_publisher(bucket, 0)
    publisher._timeout_s = 0.05
    publisher.publish(shards(0, 0))
    with pytest.raises(RetryError):
        publisher.flush()
    close([publisher])
    other = rank_publisher(bucket, 0)
    other.publish({name: bits ^ 1 for name, bits in shards(0, 0).items()})
    with pytest.raises(InputError, match="session"):
        other.flush()
    close([other, *publishers])
    assert newest_version(bucket) is None
    for session in ("", "a/b", "..", "x" * 80):
        with pytest.raises(InputError):
            rank_publisher(bucket, 0, session=session)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_each_operation_in_turn(done):
    """An operation that fails once is retried, in whichever rank."""
    for at in range(1, 40, 3):
        bucket = FaultyBucket(open_bare_bucket("memory://"))
        publishers = [rank_publisher(bucket, rank, threads=1) for rank in range(RANKS)]
        assert publish_all(publishers, 0) == [None] * RANKS
        bucket.fail(at=at, done=done)
        assert publish_all(publishers, 1) == [None] * RANKS
        close(publishers)
        bucket.heal()
        assert audit(bucket, weights) == 1


def test_wrong_shards_are_refused(bucket):
    publisher = rank_publisher(bucket, 0)
    good = shards(0, 0)
    for wrong in (
        {},
        {**good, "more": good["norm"]},
        {**good, "norm": good["norm"][:-1].copy()},
        {**good, "norm": good["norm"].astype("u2")},
    ):
        with pytest.raises(InputError):
            publisher.publish(wrong)
    assert threading.active_count() < 50
    close([publisher])


def test_a_rank_whose_mirror_differs_by_a_bit_commits_nothing(bucket):
    """Its delta would lead readers to other bits: no one could decode the version."""
    publishers = [rank_publisher(bucket, rank) for rank in range(RANKS)]
    assert publish_all(publishers, 0) == [None] * RANKS
    digest = publishers[0].digest
    close(publishers)
    again = [
        rank_publisher(bucket, r, version=0, digest=digest, session="s1", epoch=1, timeout_s=0.5)
        for r in range(RANKS)
    ]
    name = next(iter(again[1]._writer.baseline.tensors))
    odd = again[1]._writer.baseline
    odd.tensors[name][0] ^= 1
    # As if it had been loaded so: what the rank would compute at its start.
    again[1]._writer.restart_from(odd)
    errors = publish_all(again, 1)
    assert "do not add up" in str(errors[0])
    assert isinstance(errors[0], InputError)
    close(again)
    assert newest_version(bucket) == 0
    assert audit(bucket, weights) == 0


@pytest.mark.parametrize("whose", ["one", "all"])
def test_a_wrong_base_digest_commits_nothing(bucket, whose):
    publishers = [rank_publisher(bucket, rank) for rank in range(RANKS)]
    assert publish_all(publishers, 0) == [None] * RANKS
    good = publishers[0].digest
    close(publishers)
    bad = good + good
    again = [
        rank_publisher(
            bucket,
            rank,
            version=0,
            digest=bad if whose == "all" or rank == 1 else good,
            session="s1",
            epoch=1,
            timeout_s=0.5,
        )
        for rank in range(RANKS)
    ]
    errors = publish_all(again, 1)
    assert all(errors)
    assert isinstance(errors[1], FencedError)
    close(again)
    assert newest_version(bucket) == 0


def test_oversize_metadata_is_refused_before_anything_is_staged(bucket):
    publisher = rank_publisher(bucket, 0)
    before = len(bucket.operations)
    with pytest.raises(InputError, match="metadata"):
        publisher.publish(shards(0, 0), metadata={"x": "y" * (1 << 20)})
    assert len(bucket.operations) == before
    assert publisher._commits.pending is None
    close([publisher])
