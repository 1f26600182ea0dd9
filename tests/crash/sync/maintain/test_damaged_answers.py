"""Maintenance that gets a bad answer: the object is whole, and nothing is done for good on it."""

import threading
from collections import Counter
from contextlib import suppress

import pytest
from history import snapshot, weights

from deltawire.errors import DeltawireError, RetryError, UnreadableError
from deltawire.store import open_bare_bucket
from deltawire.sync import Relay, find_run, load_mirror, open_publisher, read_manifest, read_run
from deltawire.sync.chain.retention import _References, prune
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket, flip_bit, half
from deltawire.testing.tiny import TENSORS, same_bits, start_publisher
from deltawire.wire import keys
from deltawire.wire.signing import Ed25519Signer

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
    bucket = open_bare_bucket("memory://")
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


@pytest.mark.parametrize("which", [keys.MANIFESTS, keys.COMPACTED])
@pytest.mark.parametrize("at", [1, 2])
def test_a_new_version_that_one_listing_leaves_out_keeps_its_blobs(bucket, which, at):
    """It was committed after retention had looked, and may share blobs with what is deleted."""
    references = _References(bucket, read_run(bucket.inner), ANCHORS[-1], set())
    known = set(references.update())
    publish(bucket.inner, NEWEST + 1, NEWEST + 2)  # Version 12 has an anchor.
    real, listings = bucket.list_objects, []

    def short(prefix, *, after=None):
        found = real(prefix, after=after)
        if prefix == which:
            listings.append(prefix)
            return [] if len(listings) == at else found
        return found

    bucket.list_objects = short
    sound = _References(bucket.inner, read_run(bucket.inner), ANCHORS[-1], set())
    needed = sound.update()
    assert needed - known, "otherwise this test proves nothing"
    assert references.update() >= needed


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


def test_sound_answers_cost_retention_three_listings_more(bucket):
    """Reads that are sound are not repeated: only checkpoints and tags are listed a second time,
    tags once more after the floor was raised, and, once it is known what to delete, manifests and
    compacted deltas."""
    bucket.inner.delete(keys.checkpoint_commit(5))
    pruned(bucket, cutoff=NEWEST)
    verbs = Counter(verb for verb, _ in bucket.operations)
    assert (verbs["get"], verbs["list"], verbs["head"]) == (22, 23, 13)
    assert sum(op == ("list", keys.CHECKPOINTS) for op in bucket.operations) == 2
    assert sum(op == ("list", keys.TAGS) for op in bucket.operations) == 4


def relay_all(source, destination, **options):
    carrier = Relay(source, destination, start=0, strides=(), grace_s=0, **options)
    try:
        carrier.advance()
    finally:
        carrier.close()
    return carrier


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_relay_seals_no_damaged_run_for_good(damage, signed):
    """`run.json` is created once: what a reader would refuse there would stay."""
    signer = Ed25519Signer.generate() if signed else None
    inner, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    open_publisher(inner, weights(0), specs=TENSORS, signer=signer).close()
    for at in range(1, 4):
        source = FaultyBucket(inner)
        source.damage(keys.RUN, DAMAGES[damage], at=at, times=1)
        with suppress(DeltawireError):
            relay_all(source, destination)
        there = destination.get(keys.RUN, limit=1 << 20)
        assert there in (None, inner.get(keys.RUN, limit=1 << 20))
    relay_all(inner, destination)
    assert find_run(destination) == find_run(inner)


def test_a_run_that_stays_unreadable_is_not_copied(bucket):
    destination = open_bare_bucket("memory://")
    bucket.damage(keys.RUN, DAMAGES["a flipped bit"], at=2)
    with pytest.raises(UnreadableError, match=r"run\.json"):
        relay_all(bucket, destination)
    assert destination.list("") == []


@pytest.mark.parametrize("answers", [1, 2, 3, None])
def test_a_relay_passes_over_no_version_because_its_answers_are_damaged(original, answers):
    """Without version 9, readers of the region would stay at 8 until the next anchor."""
    destination = open_bare_bucket("memory://")
    relay_all(before(original, 8), destination)
    source = FaultyBucket(snapshot(original))
    source.damage(keys.manifest(9), half, times=answers)
    carrier = Relay(source, destination, strides=(), grace_s=0)
    if answers is None:
        with pytest.raises(UnreadableError, match="cannot be read") as caught:
            carrier.advance()
        assert caught.value.key == keys.manifest(9)
        assert carrier.version == 8
        assert carrier.alarm is caught.value
    else:
        carrier.advance()
    source.heal()
    carrier.advance()
    assert carrier.alarm is None
    carrier.close()
    assert destination.list(keys.MANIFESTS) == original.list(keys.MANIFESTS)
    assert_whole(destination, 0)


def test_a_relay_that_waits_for_an_unreadable_version_says_so(original):
    destination = open_bare_bucket("memory://")
    relay_all(before(original, 8), destination)
    source, stop = FaultyBucket(snapshot(original)), threading.Event()
    source.damage(keys.manifest(9), half)
    carrier = Relay(source, destination, strides=(), grace_s=0)
    events = carrier.follow(stop=stop)
    alarm = next(events)
    assert (alarm.kind, alarm.version) == ("alarm", 9)
    assert keys.manifest(9) in alarm.alarm
    source.heal()
    copied = (done.version for done in events if done.kind == "version")
    assert [next(copied) for _ in range(2)] == [9, 10]
    stop.set()
    carrier.close()


def test_a_relay_follows_a_line_that_skips_a_number(original):
    """By the same rule as readers: a later version says that the number belongs to none."""
    source, destination = snapshot(original), open_bare_bucket("memory://")
    relay_all(source, destination)
    source.put(keys.manifest(NEWEST + 1), b"junk")
    publish(source, NEWEST + 2, NEWEST + 3, anchor_every=0)
    carrier = relay_all(source, destination)
    assert carrier.version == NEWEST + 3
    assert keys.manifest(NEWEST + 1) in str(carrier.alarm)
    mirror = load_mirror(destination, read_run(destination))
    assert same_bits(mirror.tensors, weights(NEWEST + 3))


def before(bucket, newest):
    """The bucket as it was when ``newest`` was its newest version."""
    copy = snapshot(bucket)
    for key in [*copy.list(keys.MANIFESTS), *copy.list(keys.COMPACTED)]:
        name = keys.compacted_of(key)
        if (keys.trailing_number(key) if name is None else name[1]) > newest:
            copy.delete(key)
    return copy


def test_a_relay_prunes_nothing_on_a_damaged_tombstone_or_floor(original):
    inner, filled = snapshot(original), open_bare_bucket("memory://")
    inner.delete(keys.checkpoint_commit(5))
    relay_all(inner, filled)
    prune(inner, read_run(inner), cutoff=NEWEST, grace_s=0)
    at = 0
    while True:
        at += 1
        source, destination = FaultyBucket(inner), snapshot(filled)
        carrier = Relay(source, destination, strides=(), grace_s=0)
        del source.operations[:]
        source.damage("*", half, at=at, times=1)
        with suppress(DeltawireError):
            carrier.prune()
        reads = sum(verb in ("get", "range") for verb, _ in source.operations)
        source.heal()
        assert_whole(destination, 8)
        carrier.prune()
        carrier.close()
        assert destination.list(keys.BLOBS) == inner.list(keys.BLOBS)
        if reads < at:
            break
    assert at > 5
