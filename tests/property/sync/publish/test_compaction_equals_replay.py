"""A compacted delta equals step-by-step replay; readers that lag far need few objects."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import codec
from deltawire.errors import InputError
from deltawire.store import open_bare_bucket
from deltawire.sync import COMPACTION_STRIDES, Compactor, Subscriber, load_mirror, read_manifest
from deltawire.sync.chain.objects import read_compacted_delta
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.follow.fetch import decode_delta
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import same_bits, start_publisher, weights
from deltawire.wire import keys

LONG = 129


@pytest.fixture(scope="module")
def long_run():
    """A chain with one anchor, the first version, and its compacted deltas."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=0, compaction_strides=COMPACTION_STRIDES)
    for version in range(LONG):
        publisher.publish(weights(version))
    publisher.close()
    assert publisher.compaction.error is None
    return bucket, publisher.run, publisher.compaction.made


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([(2,), (3,), (2, 4), (2, 6), (4, 8)]),
    st.integers(1, 14),
    st.integers(0, 1000),
    st.integers(0, 14),
)
def test_a_compacted_delta_equals_replay(strides, versions, seed, begun):
    bucket = open_bare_bucket("memory://")
    publisher = start_publisher(bucket, seed=seed, anchor_every=5)
    compactor = Compactor(bucket, publisher.run, strides, threads=1)
    made = []
    for version in range(versions + 1):
        publisher.publish(weights(version, seed=seed))
        publisher.flush()
        if version >= begun:
            made += compactor.compact_up_to(version)
    publisher.close()
    run = publisher.run
    names = [keys.compacted_of(key) for key in bucket.list(keys.COMPACTED)]
    compacted = [name for name in names if name[0] is not None]
    assert compacted == sorted(made, key=lambda delta: (delta[1], delta[0]))
    for base, target in made:
        assert target - base in strides
        assert target % (target - base) == 0
        delta, mirror = (
            read_compacted_delta(bucket, run, base, target),
            load_mirror(bucket, run, at=base),
        )
        pieces, held = decode_delta(bucket, run, delta, delta.payload, mirror)
        mirror.move(pieces, target, codec.Digest.from_hex(delta.digest), held)
        assert same_bits(mirror.tensors, weights(target, seed=seed))
        assert mirror.compute_held().hex() == read_manifest(bucket, run, target).digest
        spanned = [read_manifest(bucket, run, v).delta.bytes for v in range(base + 1, target + 1)]
        assert delta.payload.bytes < sum(spanned)


def test_all_that_is_due_is_made(long_run):
    _, _, made = long_run
    due = {(t - s, t) for s in COMPACTION_STRIDES for t in range(s, LONG, s)}
    assert set(made) <= due
    # Short strides are dropped where random changes hardly overlap; the long ones never.
    assert {(t - 64, t) for t in (64, 128)} <= set(made)
    assert len(made) > 0.8 * len(due)


@pytest.mark.parametrize("start", [0, 1, 3, 5, 17, 47, 61, 67, 68])
def test_a_reader_that_lags_sixty_versions_needs_few_objects(long_run, start):
    """At most 12 deltas, compacted deltas and anchors from any version."""
    bucket, run, made = long_run
    newest = start + 60
    for version in range(newest + 1, LONG):
        bucket.hide(keys.manifest(version))
    bucket.heal() if newest == LONG - 1 else None
    subscriber = Subscriber(bucket, run, load_mirror(bucket.inner, run, at=start))
    before, steps = len(bucket.operations), 0
    while (update := subscriber.prepare()) is not None:
        subscriber.commit(update)
        steps += 1
    asked = bucket.operations[before:]
    bucket.heal()
    assert subscriber.mirror.version == newest
    assert same_bits(subscriber.mirror.tensors, weights(newest))
    blobs = {key for verb, key in asked if verb in ("get", "range") and key.startswith(keys.BLOBS)}
    dropped = len({(t - s, t) for s in COMPACTION_STRIDES for t in range(s, LONG, s)} - set(made))
    assert steps <= 12 + 3 * dropped
    assert len(blobs) == steps
    # Planning reads few manifests and compacted deltas as well.
    assert len(asked) < 60


def test_a_damaged_compacted_delta_is_avoided(long_run):
    bucket, run, _ = long_run
    for damage in ("object", "blob", "missing"):
        delta = read_compacted_delta(bucket.inner, run, 0, 64)
        key = keys.compacted(0, 64)
        if damage == "object":
            bucket.damage(key, lambda data: flip_bit(data, 99))
        elif damage == "blob":
            bucket.hide(keys.blob(read_blobs(bucket, run, delta.payload)[0].hash))
        else:
            bucket.hide(key)
        mirror = load_mirror(bucket, run, at=66)
        assert same_bits(mirror.tensors, weights(66))
        subscriber = Subscriber(bucket, run, load_mirror(bucket.inner, run, at=0))
        assert subscriber.advance()
        assert same_bits(subscriber.mirror.tensors, weights(LONG - 1))
        bucket.heal()


def test_a_missing_delta_is_spanned_by_a_compacted_delta(long_run):
    """Recovery without an operator where another path exists."""
    bucket, run, _ = long_run
    lost = read_blobs(bucket.inner, run, read_manifest(bucket.inner, run, 30).delta)[0]
    bucket.hide(keys.blob(lost.hash))
    bucket.hide(keys.manifest(31))
    subscriber = Subscriber(bucket, run, load_mirror(bucket.inner, run, at=29))
    try:
        assert subscriber.advance()
        assert same_bits(subscriber.mirror.tensors, weights(LONG - 1))
    finally:
        bucket.heal()


def test_every_flipped_bit_of_a_compacted_delta_is_detected(long_run):
    bucket, run, _ = long_run
    key = keys.compacted(64, 128)
    for place in range(0, 8 * bucket.inner.size(key), 3):
        bucket.damage(key, lambda data, place=place: flip_bit(data, place))
        subscriber = Subscriber(bucket, run, load_mirror(bucket.inner, run, at=127))
        assert subscriber.advance()
        assert same_bits(subscriber.mirror.tensors, weights(128))
        bucket.heal()
        if place > 300:
            break


def test_strides_must_nest():
    bucket = open_bare_bucket("memory://")
    publisher = start_publisher(bucket)
    for strides in ((1,), (4, 6), (0, 4)):
        with pytest.raises(InputError, match="multiples"):
            Compactor(bucket, publisher.run, strides)
    publisher.close()


def test_a_mirror_that_was_lost_on_the_way_is_filled_again():
    """As by a store that falls silent while the compactor's mirror is read from an anchor."""
    bucket = open_bare_bucket("memory://")
    publisher = start_publisher(bucket, anchor_every=4)
    compactor = Compactor(bucket, publisher.run, (2, 4))
    for version in range(13):
        publisher.publish(weights(version))
        publisher.flush()
        if version == 4:
            compactor.compact_up_to(version)
            compactor._mirror.begin()
    assert compactor.compact_up_to(12)[-1] == (8, 12)
    publisher.close()
    assert Subscriber(bucket, publisher.run, load_mirror(bucket, publisher.run, at=8)).advance()


def test_a_compacted_delta_that_readers_would_refuse_is_not_published(monkeypatch):
    bucket = open_bare_bucket("memory://")
    publisher = start_publisher(bucket, anchor_every=0)
    for version in range(3):
        publisher.publish(weights(version))
    publisher.close()
    with monkeypatch.context() as patch:
        patch.setattr("deltawire.sync.publish.compaction.too_many", lambda payload: "too many")
        assert Compactor(bucket, publisher.run, (2,)).compact_up_to(2) == []
    assert Compactor(bucket, publisher.run, (2,)).compact_up_to(2) == [(0, 2)]


def test_failed_compactions_do_not_stop_the_publisher():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=0, compaction_strides=(2, 4))
    bucket.fail(
        "create", "weights/compacted/*", times=None, error=lambda verb, key: RuntimeError(key)
    )
    for version in range(6):
        publisher.publish(weights(version))
    publisher.close()
    assert "cannot compact: RuntimeError" in str(publisher.compaction.error)
    assert publisher.version == 5
    bucket.heal()
    again = start_publisher(bucket, anchor_every=0, compaction_strides=(2, 4))
    for version in range(6, 9):
        again.publish(weights(version))
    again.close()
    assert again.compaction.error is None
    assert {(4, 6), (6, 8), (4, 8)} & set(again.compaction.made)


def test_a_lost_blob_costs_the_compacted_deltas_over_it_and_no_others():
    """Such an error once stopped compaction forever without a report."""
    bucket = open_bare_bucket("memory://")
    publisher = start_publisher(bucket, anchor_every=4)
    for version in range(13):
        publisher.publish(weights(version))
    publisher.close()
    lost = read_manifest(bucket, publisher.run, 3).delta
    for ref in read_blobs(bucket, publisher.run, lost):
        bucket.delete(keys.blob(ref.hash))
    compactor = Compactor(bucket, publisher.run, (2, 4))
    compactor.compact_up_to(2)
    made = compactor.compact_up_to(12)
    assert compactor.failures.keys() == {(2, 4), (0, 4)}
    assert all("blob is missing" in error.message for error in compactor.failures.values())
    assert {(4, 6), (6, 8), (4, 8), (8, 12)} <= set(made)


def test_failed_compactions_are_reported_with_the_next_commit():
    bucket = open_bare_bucket("memory://")
    told = []
    publisher = start_publisher(
        bucket, anchor_every=100, compaction_strides=(2,), on_commit=told.append
    )
    for version in range(4):
        publisher.publish(weights(version))
    publisher.flush()
    for key in bucket.list(keys.BLOBS):
        bucket.delete(key)
    version, deadline = 4, time.monotonic() + 120
    while version < 8 or (told[-1].compaction_error == "" and time.monotonic() < deadline):
        publisher.publish(weights(version))
        publisher.flush()
        time.sleep(0.05)
        version += 1
    publisher.close()
    assert told[3].compaction_error == ""
    assert "is missing" in told[-1].compaction_error


def test_compaction_begins_at_the_first_version_that_it_is_told():
    """Also where nothing is due there yet, and many versions come before it is told again."""
    bucket = open_bare_bucket("memory://")
    publisher = start_publisher(bucket)
    for version in range(9):
        publisher.publish(weights(version))
    publisher.close()
    compactor = Compactor(bucket, publisher.run, (2, 4))
    assert compactor.compact_up_to(1) == []
    assert compactor.compact_up_to(8) == [(0, 2), (2, 4), (0, 4), (4, 6), (6, 8), (4, 8)]
