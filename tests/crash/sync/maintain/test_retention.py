"""Retention: what is kept can be read, what is stalled stays out, what fails does no harm."""

from contextlib import suppress

import pytest
from anchored import anchor_payload

from deltawire.errors import (
    BugError,
    CorruptError,
    DeltawireError,
    FencedError,
    InputError,
    RetryError,
    UnreadableError,
)
from deltawire.store import (
    DelegatingBucket,
    RetryingBucket,
    open_bare_bucket,
    open_bucket,
    retrying,
)
from deltawire.sync import Subscriber, load_mirror, newest_version, read_manifest
from deltawire.sync.chain import objects as chain
from deltawire.sync.chain import retention
from deltawire.sync.chain.retention import prune
from deltawire.testing.faulty import FaultyBucket, no_answer
from deltawire.testing.tiny import same_bits, start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
from deltawire.wire.seal import seal

NEWEST = 10
ANCHORS = (0, 4, 8)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


def fill(bucket, newest=NEWEST, **options):
    publisher = start_publisher(
        bucket, **{"anchor_every": 4, "compaction_strides": (2, 4), **options}
    )
    for version in range(publisher.version + 1, newest + 1):
        publisher.publish(weights(version))
    publisher.close()
    return publisher.run


@pytest.fixture(params=["memory", "folder"])
def bucket(request, tmp_path):
    inner = open_bare_bucket("memory://" if request.param == "memory" else str(tmp_path))
    bucket = FaultyBucket(inner)
    fill(bucket)
    return bucket


def publish_and_wait(publisher, tensors):
    publisher.publish(tensors)
    publisher.flush()


def raise_floor(bucket, run, version, *, run_id=None):
    """A floor as retention raises it, or one of another run."""
    key = keys.retention_floor(version)
    floor = RetentionFloor(run=run_id or run.id, version=version)
    bucket.put(key, seal(floor, key=key))


def stored(bucket):
    return {entry.key: entry.bytes for entry in bucket.inner.list_objects("")}


def assert_kept(bucket, first):
    """Every version from ``first`` on is whole, and readers of any age get to the newest."""
    inner, run = bucket.inner, start_run(bucket.inner)
    newest = newest_version(inner)
    for version in range(first, newest + 1):
        assert same_bits(load_mirror(inner, run, at=version).tensors, weights(version))
    for version in range(first):
        with pytest.raises(CorruptError, match="retention has pruned"):
            load_mirror(inner, run, at=version)


@pytest.mark.parametrize("cutoff", [4, 5, 7, 8, NEWEST, NEWEST + 5])
def test_hangs_on_the_newest_anchor_at_or_before_the_cutoff(bucket, cutoff):
    run = start_run(bucket)
    before = stored(bucket)
    found = prune(bucket, run, cutoff=cutoff, grace_s=0)
    anchor = max(a for a in ANCHORS if a <= cutoff)
    assert (found.anchor, found.floor, found.pruned_below) == (anchor, anchor, anchor)
    assert found.manifests == list(range(anchor))
    assert_kept(bucket, anchor)
    after = stored(bucket)
    gone = {key for key in before if key not in after}
    assert gone == set(found.blobs) | set(found.compacted)
    assert found.bytes == sum(before[key] for key in found.blobs) > 0
    assert {keys.manifest(v) for v in range(NEWEST + 1)} <= after.keys()
    # A second time there is nothing left to do.
    again = prune(bucket, run, cutoff=cutoff, grace_s=0)
    assert (again.manifests, again.compacted, again.blobs) == ([], [], [])
    fill(bucket, NEWEST + 3)
    assert_kept(bucket, anchor)


def test_tombstones_of_earlier_calls_are_not_listed_again(bucket, monkeypatch):
    """A run of years has a hundred thousand of them, of which each page is a request."""
    run, shown = start_run(bucket), []
    prune(bucket, run, cutoff=4, grace_s=0)
    fill(bucket, NEWEST + 4)
    list_objects = FaultyBucket.list_objects

    def listing(self, prefix, *, after=None):
        found = list_objects(self, prefix, after=after)
        shown.extend(one.key for one in found)
        return found

    monkeypatch.setattr(FaultyBucket, "list_objects", listing)
    monkeypatch.setattr(retention, "newest_readable", lambda *_: read_manifest(bucket, run, 14))
    assert prune(bucket, run, cutoff=NEWEST, grace_s=0).manifests == [4, 5, 6, 7]
    assert not {keys.manifest(version) for version in range(4)} & set(shown)
    assert {keys.manifest(version) for version in range(4, 15)} <= set(shown)
    assert prune(bucket, run, cutoff=NEWEST, grace_s=0).manifests == []
    assert_kept(bucket, 8)


def test_without_an_anchor_that_is_there_nothing_is_deleted(bucket):
    run = start_run(bucket)
    before = stored(bucket)
    assert prune(bucket, run, cutoff=-1, grace_s=0).anchor is None
    for version in (8, 4):
        for ref in anchor_payload(bucket, run, version).blobs:
            bucket.hide(keys.blob(ref.hash))
    found = prune(bucket, run, cutoff=NEWEST, grace_s=0)
    assert found.anchor == 0
    assert (found.manifests, found.blobs) == ([], [])
    bucket.heal()
    after = stored(bucket)
    assert {key: after[key] for key in before} == before


def test_an_anchor_from_which_the_newest_cannot_be_reached_does_not_count():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    run = fill(bucket, compaction_strides=())
    bucket.hide(keys.manifest(9))
    assert prune(bucket, run, cutoff=NEWEST, grace_s=0).anchor is None


def test_the_grace_period(bucket):
    run = start_run(bucket)
    before = stored(bucket)
    found = prune(bucket, run, cutoff=8, grace_s=3600)
    assert (found.floor, found.pruned_below) == (8, 0)
    assert (found.manifests, found.compacted, found.blobs) == ([], [], [])
    # Closed, but still stored: readers that planned earlier can fetch it.
    assert before.items() <= stored(bucket).items()
    for version in range(NEWEST + 1):
        assert same_bits(load_mirror(bucket, run, at=version).tensors, weights(version))
    found = prune(bucket, run, cutoff=8, grace_s=0)
    assert found.pruned_below == 8


def test_a_dry_run_deletes_nothing_and_says_what_it_would(bucket):
    run = start_run(bucket)
    prune(bucket, run, cutoff=8, grace_s=3600)
    before = stored(bucket)
    would = prune(bucket, run, cutoff=8, grace_s=0, dry_run=True)
    assert stored(bucket) == {**before, keys.CLOCK: 1}
    assert prune(bucket, run, cutoff=8, grace_s=0) == would
    assert would.blobs


def test_a_checkpoint_holds_its_version(bucket):
    run = start_run(bucket)
    bucket.put(keys.checkpoint_commit(5), b'{"version":5}')
    assert prune(bucket, run, cutoff=NEWEST, grace_s=0).anchor == 4
    assert_kept(bucket, 4)


@pytest.mark.parametrize("held", range(NEWEST + 1))
def test_readers_at_any_version_continue(bucket, held):
    run = start_run(bucket)
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=held))
    prune(bucket, run, cutoff=8, grace_s=0)
    subscriber.advance()
    assert subscriber.mirror.version == NEWEST
    assert same_bits(subscriber.mirror.tensors, weights(NEWEST))


def test_readers_caught_between_plan_and_fetch(bucket):
    run = start_run(bucket)
    for stop in range(1, 12):
        fresh = FaultyBucket(open_bare_bucket("memory://"))
        for key in stored(bucket):
            fresh.inner.put(key, bucket.inner.get(key, limit=1 << 20))
        subscriber = Subscriber(RetryingBucket(fresh), run, load_mirror(fresh.inner, run, at=0))

        def strike(verb, key, fresh=fresh):
            prune(fresh.inner, run, cutoff=8, grace_s=0)
            return no_answer(verb, key)

        fresh.fail(at=stop, error=strike)
        subscriber.advance()
        assert same_bits(subscriber.mirror.tensors, weights(NEWEST))


def test_a_writer_stalled_for_longer_than_retention_commits_nothing(bucket):
    """Its name for version 3 must not be free again, and it must find out at once."""
    other = FaultyBucket(open_bare_bucket("memory://"))
    fill(other, 2)
    stalled = start_publisher(other, compaction_strides=())
    fill(other, NEWEST)
    run = start_run(other)
    prune(RetryingBucket(other), run, cutoff=8, grace_s=0)
    for _ in range(2):
        with pytest.raises(FencedError):
            publish_and_wait(stalled, weights(3, seed=9))
    stalled.close()
    assert read_manifest(other, run, 3).pruned
    assert_kept(other, 8)


def test_a_lost_name_below_the_floor_is_closed_too(bucket):
    run = start_run(bucket)
    bucket.inner.delete(keys.manifest(2))
    prune(bucket, run, cutoff=8, grace_s=0)
    assert read_manifest(bucket, run, 2).pruned
    assert bucket.create(keys.manifest(2), b"") is False


def test_the_floor_holds_although_somebody_deletes_the_tombstones(bucket):
    """A lifecycle rule of the store, say."""
    other = FaultyBucket(open_bare_bucket("memory://"))
    fill(other, 2)
    stalled = start_publisher(other, compaction_strides=())
    stalled._writer.head_checked = True  # It had read the newest manifest before it stalled.
    fill(other, NEWEST)
    run = start_run(other)
    prune(RetryingBucket(other), run, cutoff=8, grace_s=0)
    for version in range(8):
        other.inner.delete(keys.manifest(version))
    with pytest.raises(FencedError, match="closed"):
        publish_and_wait(stalled, weights(3, seed=9))
    stalled.close()


def test_a_commit_that_could_not_read_the_floors_reads_them_again(bucket):
    """The version is committed when the store falls silent; what becomes of it is found out by the
    next publish, which must read the floors as well."""
    publisher = start_publisher(bucket, anchor_every=4)
    bucket.fail("list", keys.RETENTION_FLOORS, times=6)
    publisher.publish(weights(NEWEST + 1))
    with pytest.raises(RetryError):
        publisher.flush()
    raise_floor(bucket, publisher.run, NEWEST + 2)
    bucket.put(keys.manifest(NEWEST + 2), b"another publisher's")
    with pytest.raises(FencedError, match="closed this version"):
        publisher.publish(weights(NEWEST + 2))
    publisher.close()


def test_the_floor_is_never_lowered(bucket):
    run = start_run(bucket)
    prune(bucket, run, cutoff=8, grace_s=0)
    assert prune(bucket, run, cutoff=4, grace_s=0).floor == 8
    assert chain.newest_retention_floor(bucket, run) == 8
    with pytest.raises(InputError):
        prune(bucket, run, cutoff=8, grace_s=-1)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("times", [1, None], ids=["once", "for-ever"])
def test_each_operation_in_turn(done, times):
    inner = open_bare_bucket("memory://")
    run = fill(inner)
    count = FaultyBucket(inner)
    prune(count, run, cutoff=8, grace_s=0, dry_run=True)
    objects = {key: inner.get(key, limit=1 << 20) for key in inner.list("")}
    at, ended = 0, False
    while not ended:
        at += 1
        fresh = FaultyBucket(open_bare_bucket("memory://"))
        for key, data in objects.items():
            fresh.inner.put(key, data)
        fresh.fail(at=at, times=times, done=done)
        with suppress(DeltawireError):
            prune(RetryingBucket(fresh), run, cutoff=8, grace_s=0)
            ended = len(fresh.operations) < at
        for version in (8, 9, 10):
            assert same_bits(load_mirror(fresh.inner, run, at=version).tensors, weights(version))
        fresh.heal()
        prune(RetryingBucket(fresh), run, cutoff=8, grace_s=0)
        assert_kept(fresh, 8)
        assert not set(prune(RetryingBucket(fresh), run, cutoff=8, grace_s=0).blobs)
    assert at > 40


@pytest.mark.parametrize("floor", ["empty", "another run's", "sealed, above the newest"])
def test_an_object_at_a_floors_key_deletes_nothing(bucket, floor):
    """An empty object once made the owner's own retention delete every version."""
    run = start_run(bucket)
    before = stored(bucket)
    if floor == "empty":
        bucket.put(keys.retention_floor(40), b"")
    elif floor == "another run's":
        raise_floor(bucket, run, 8, run_id="0" * 32)
    else:
        raise_floor(bucket, run, 40)
    found = prune(bucket, run, cutoff=-1, grace_s=0)
    assert (found.floor, found.pruned_below, found.manifests, found.blobs) == (0, 0, [], [])
    assert any("retention-floor" in text for text in found.refused)
    assert before.items() <= stored(bucket).items()
    # The owner's own floor is raised over it, and its publisher is not stopped by it.
    assert prune(bucket, run, cutoff=8, grace_s=0).pruned_below == 8
    fill(bucket, NEWEST + 1)
    assert_kept(bucket, 8)


def test_a_floor_of_the_run_itself_deletes_no_more_than_can_be_missed_now(bucket):
    """Any process that can write could raise one to the newest version of an unsigned run."""
    run = start_run(bucket)
    raise_floor(bucket, run, NEWEST)
    found = prune(bucket, run, cutoff=5, grace_s=0)
    assert (found.anchor, found.floor, found.pruned_below) == (4, NEWEST, 4)
    assert same_bits(load_mirror(bucket, run, at=5).tensors, weights(5))


JUNK = [
    keys.manifest(9_999_999_999),
    keys.manifest(NEWEST + 3),
    keys.compacted(None, 9_999_999_999),
    keys.compacted(9, 10),
    keys.checkpoint_commit(0),
]


@pytest.mark.parametrize("key", JUNK)
def test_junk_that_may_be_needed_stops_retention_and_is_named(bucket, key):
    """An answer that is damaged each time may hide an object that says what is kept."""
    run = start_run(bucket)
    bucket.put(key, b"junk")
    before = stored(bucket)
    with pytest.raises(UnreadableError, match="so nothing was deleted") as caught:
        prune(bucket, run, cutoff=8, grace_s=0)
    assert caught.value.key == key
    assert before.items() <= stored(bucket).items()
    bucket.delete(key)
    assert prune(bucket, run, cutoff=8, grace_s=0).blobs
    assert_kept(bucket, 8)


def test_junk_that_nothing_needs_does_not_steer_retention(bucket):
    run = start_run(bucket)
    other = f"{keys.CHECKPOINTS}0000000001/other"
    for key in (keys.compacted(9, 7), keys.deletion_intent("junk"), other):
        bucket.put(key, b"junk")
    found = prune(bucket, run, cutoff=8, grace_s=0)
    assert (found.anchor, found.pruned_below) == (8, 8)
    assert found.blobs
    fill(bucket, NEWEST + 1)
    for version in range(8, NEWEST + 1):
        assert same_bits(load_mirror(bucket, run, at=version).tensors, weights(version))


@pytest.mark.parametrize("most", [0, 1])
def test_names_of_missing_versions_are_filled_but_no_endless_range(bucket, monkeypatch, most):
    run = start_run(bucket)
    bucket.inner.delete(keys.manifest(2))
    monkeypatch.setattr("deltawire.sync.chain.retention.MAX_FILLED", most)
    found = prune(bucket, run, cutoff=4, grace_s=0)
    assert (2 in found.manifests) == (most == 1)
    assert len(found.refused) == 1 - most


class Guard(DelegatingBucket):
    """A layer of a user's, without `with_inner`."""


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_layer_that_cannot_be_kept_is_refused_before_anything_is_deleted(tmp_path, dry_run):
    bucket = Guard(open_bucket(str(tmp_path / "run"), create=True))
    run = fill(open_bare_bucket(str(tmp_path / "run")))
    before = bucket.list("")
    with pytest.raises(BugError, match="Guard has no with_inner"):
        prune(bucket, run, cutoff=NEWEST, grace_s=0, dry_run=dry_run)
    assert bucket.list("") == before
