"""Maintenance that gets a bad answer: the object is whole, and nothing is done for good on it."""

from collections import Counter

import pytest
from history import snapshot, weights

from deltawire.errors import DeltawireError, RetryError, UnreadableError
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_manifest, read_run
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.maintain.retention import prune
from deltawire.testing.faulty import FaultyBucket, flip_bit, half
from deltawire.testing.tiny import same_bits, start_publisher
from deltawire.wire import keys

NEWEST = 10
ANCHORS = (0, 4, 8)

DAMAGES = {
    "a flipped bit": lambda data: flip_bit(data, 4321),
    "a short body": half,
    "an empty body": lambda data: b"",
}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("deltawire.store.retrying.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(FaultyBucket, "poll_s", 0.0)


def publish(bucket, first, last, **options):
    publisher = start_publisher(bucket, **{"anchor_every": 4, "compaction_strides": (), **options})
    for version in range(first, last + 1):
        publisher.publish(weights(version))
        publisher.flush()
    publisher.close()


@pytest.fixture(scope="module")
def original():
    bucket = open_bucket("memory://")
    publish(bucket, 0, NEWEST)
    bucket.put(keys.checkpoint_commit(5), b'{"version":5}')
    return bucket


@pytest.fixture
def bucket(original):
    return FaultyBucket(snapshot(original))


def pruned(bucket, **options):
    return prune(bucket, read_run(bucket.inner), grace_s=0, **options)


def assert_whole(bucket, first, newest=NEWEST):
    """Every version from ``first`` on can be read, also by a reader that starts from nothing."""
    run = read_run(bucket)
    found = check_run(bucket)
    assert (found.whole, found.faults) == (True, [])
    for version in range(first, newest + 1):
        assert same_bits(load_mirror(bucket, run, at=version).tensors, weights(version))


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_bad_answer_does_not_delete_the_newest_anchor(original, damage):
    """Each answer of one retention in turn is damaged: what readers need stays."""
    at = 0
    while True:
        at += 1
        bucket = FaultyBucket(snapshot(original))
        bucket.inner.delete(keys.checkpoint_commit(5))
        bucket.damage("*", DAMAGES[damage], at=at, times=1)
        try:
            found = pruned(bucket, cutoff=NEWEST)
        except DeltawireError:
            found = None
        reads = sum(verb in ("get", "range") for verb, _ in bucket.operations)
        bucket.heal()
        assert_whole(bucket.inner, ANCHORS[-1])
        # A sound call finishes the work.
        last = pruned(bucket, cutoff=NEWEST)
        assert last.pruned_below == ANCHORS[-1]
        assert_whole(bucket.inner, ANCHORS[-1])
        assert not [key for key in last.blobs if found and key in found.blobs]
        if reads < at:
            break
    assert at > 20


def test_an_anchor_that_stays_unreadable_stops_retention_before_it_deletes(bucket):
    """The anchor's own object, read once more when its blobs are about to be deleted."""
    bucket.inner.delete(keys.checkpoint_commit(5))
    before = {entry.key: entry.bytes for entry in bucket.inner.list_objects("")}
    key = keys.compacted(None, ANCHORS[-1])
    assert key in before
    # The first answer, to the search for an anchor, is sound.
    bucket.damage(key, DAMAGES["a flipped bit"], at=2)
    with pytest.raises(UnreadableError, match="so nothing was deleted") as caught:
        pruned(bucket, cutoff=NEWEST)
    assert caught.value.key == key
    after = {entry.key: entry.bytes for entry in bucket.inner.list_objects("")}
    assert before.items() <= after.items()
    bucket.heal()
    assert pruned(bucket, cutoff=NEWEST).pruned_below == ANCHORS[-1]
    assert_whole(bucket.inner, ANCHORS[-1])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_answer_does_not_free_a_checkpoints_version(bucket, damage):
    bucket.damage(keys.checkpoint_commit(5), DAMAGES[damage], times=1)
    assert pruned(bucket, cutoff=NEWEST).anchor == 4
    assert_whole(bucket.inner, 4)


def test_a_checkpoint_that_stays_unreadable_stops_retention(bucket):
    bucket.damage(keys.checkpoint_commit(5), half)
    with pytest.raises(UnreadableError, match="so nothing was deleted") as caught:
        pruned(bucket, cutoff=NEWEST)
    assert caught.value.key == keys.checkpoint_commit(5)
    assert not bucket.inner.list(keys.RETENTION_FLOORS)
    bucket.heal()
    assert pruned(bucket, cutoff=NEWEST).anchor == 4


def test_a_checkpoint_that_one_listing_leaves_out_keeps_its_version(bucket):
    listings = []
    inner = FaultyBucket(bucket)
    real = bucket.list_objects

    def short(prefix, *, after=None):
        found = real(prefix, after=after)
        if prefix == keys.CHECKPOINTS:
            listings.append(prefix)
            return found if len(listings) > 1 else []
        return found

    bucket.list_objects = short
    assert pruned(inner, cutoff=NEWEST).anchor == 4


def test_a_manifest_that_is_not_found_once_is_not_written_over(bucket):
    """Its commit metadata say what it consumed: a tombstone made from nothing would lose it."""
    bucket.inner.delete(keys.checkpoint_commit(5))
    run = read_run(bucket.inner)
    wanted = read_manifest(bucket.inner, run, 6).digest
    for at in range(1, 4):
        fresh = FaultyBucket(snapshot(bucket.inner))
        real, seen = fresh.get, []

        def lost(key, *, limit, real=real, seen=seen, at=at):
            seen.append(key)
            if key == keys.manifest(6) and seen.count(key) == at:
                return None
            return real(key, limit=limit)

        fresh.get = lost
        try:
            prune(fresh, run, cutoff=NEWEST, grace_s=0)
        except RetryError:
            prune(fresh, run, cutoff=NEWEST, grace_s=0)
        found = read_manifest(fresh.inner, run, 6)
        assert (found.pruned, found.digest) == (True, wanted)


def test_a_number_that_belongs_to_no_version_does_not_stop_retention(original):
    """A publisher skipped it, because an object that nobody can read occupies it."""
    source = snapshot(original)
    source.delete(keys.checkpoint_commit(5))
    source.put(keys.manifest(NEWEST + 1), b"junk")
    publish(source, NEWEST + 2, NEWEST + 9)
    bucket = FaultyBucket(source)
    # Kept: the number is above the anchor. Closed: it is below it.
    assert pruned(bucket, cutoff=NEWEST).pruned_below == ANCHORS[-1]
    last = pruned(bucket, cutoff=NEWEST + 9)
    assert last.pruned_below > NEWEST + 1
    assert bucket.inner.get(keys.manifest(NEWEST + 1), limit=9) == b"junk"
    assert any(keys.manifest(NEWEST + 1) in text for text in last.refused)


def test_sound_answers_cost_retention_one_listing_more(bucket):
    """Reads that are sound are not repeated: only checkpoints are listed a second time."""
    bucket.inner.delete(keys.checkpoint_commit(5))
    pruned(bucket, cutoff=NEWEST)
    verbs = Counter(verb for verb, _ in bucket.operations)
    assert (verbs["get"], verbs["list"], verbs["head"]) == (21, 17, 13)
    assert sum(op == ("list", keys.CHECKPOINTS) for op in bucket.operations) == 2
