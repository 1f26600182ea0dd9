"""Versions whose piece tables are blobs: every reader and writer of a run handles them."""

import pytest
from anchored import anchor_of

from deltawire.errors import CorruptError
from deltawire.store import open_bare_bucket
from deltawire.sync import (
    Relay,
    Subscriber,
    load_mirror,
    prune,
    read_manifest,
    read_run,
)
from deltawire.sync.chain import version_poller
from deltawire.sync.chain.payloads import all_blobs, read_payload
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import audit, same_bits, start_publisher, weights
from deltawire.wire import keys

NEWEST = 8


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    """Nothing inline, pages of three segments, and segments of two pieces and of two blobs."""
    for name, value in (("INLINE_BYTES", 0), ("SEGMENT_PIECES", 2), ("PAGE_SEGMENTS", 3)):
        monkeypatch.setattr(f"deltawire.wire.piece_table.{name}", value)
    for module in ("deltawire.wire.piece_table", "deltawire.sync.chain.payloads"):
        monkeypatch.setattr(f"{module}.SEGMENT_BLOBS", 2)


@pytest.fixture
def bucket():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=4, compaction_strides=(2, 4), blob_bytes=200)
    for version in range(NEWEST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


def test_versions_are_published_and_read(bucket):
    run = read_run(bucket)
    manifest = read_manifest(bucket, run, NEWEST)
    assert all(ref.table_blob is not None for ref in manifest.payloads)
    assert audit(bucket, weights) == NEWEST
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=0), stepwise=True)
    for version in range(1, NEWEST + 1):
        subscriber.commit(subscriber.prepare())
        assert same_bits(subscriber.mirror.tensors, weights(version))
    assert check_run(bucket).faults == []


@pytest.mark.parametrize(
    "wanted", [["norm"], ["layers.0.weight", "mask"], {"embed.weight": (7, 9)}]
)
def test_a_reader_of_a_part_fetches_the_segments_that_it_needs(bucket, wanted):
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, wanted=wanted)
    whole = weights(NEWEST)
    for name, bits in mirror.tensors.items():
        start = mirror.starts.get(name, 0)
        assert bits.tolist() == whole[name].reshape(-1)[start : start + bits.size].tolist()
    manifest, ref = anchor_of(bucket, run, NEWEST)
    number = next(i for i, spec in enumerate(run.tensors) if spec.name == "norm")
    payload = read_payload(bucket, run, manifest, ref, {number: (0, 16)})
    everything = read_payload(bucket, run, manifest, ref)
    assert len(payload.pieces) < len(everything.pieces)
    (own,) = [piece for piece in payload.pieces if piece.tensor == number]
    (same,) = [piece for piece in everything.pieces if piece.tensor == number]
    assert own.sum == same.sum
    assert payload.blobs[own.blob] == everything.blobs[same.blob]


def test_a_table_that_is_lost_or_damaged_is_an_error_that_names_it(bucket):
    run = read_run(bucket)
    manifest = read_manifest(bucket, run, 7)
    key = keys.blob(manifest.delta.table.blob)
    data = bucket.inner.get(key, limit=1 << 20)
    for at in range(0, len(data), 5):
        bucket.inner.put(key, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CorruptError) as caught:
            read_payload(bucket, run, manifest, manifest.delta)
        assert (caught.value.key, caught.value.version) == (key, 7)
    faults = check_run(bucket).faults
    assert key in {fault.key for fault in faults}
    bucket.inner.delete(key)
    with pytest.raises(CorruptError, match="missing"):
        all_blobs(bucket, run, manifest)
    assert not check_run(bucket, deep=False).whole
    assert same_bits(load_mirror(bucket, run).tensors, weights(NEWEST))


@pytest.mark.parametrize("harm", ["flipped", "lost"])
@pytest.mark.parametrize("stepwise", [True, False])
def test_a_newest_version_with_a_bad_table_is_not_there_yet_and_raises_an_alarm(
    monkeypatch, stepwise, harm
):
    """As one whose manifest cannot be read: a reader stays where it is, and says why."""
    monkeypatch.setattr(version_poller, "LONGEST_RECHECK_S", 0.1)
    bucket = open_bare_bucket("memory://")
    publisher = start_publisher(bucket, anchor_every=100, compaction_strides=(), blob_bytes=200)
    for version in range(6):
        publisher.publish(weights(version))
    publisher.flush()
    run = read_run(bucket)
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=3), stepwise=stepwise)
    key = keys.blob(read_manifest(bucket, run, 5).delta.table.blob)
    data = bucket.get(key, limit=1 << 20)
    bucket.delete(key)
    if harm == "flipped":
        bucket.put(key, flip_bit(data, 99))
    subscriber.advance()
    assert subscriber.mirror.version == 4
    for _ in range(3):
        assert subscriber.prepare() is None
        assert (subscriber.alarm.key, subscriber.alarm.version) == (key, 5)
    assert load_mirror(bucket, run).version == 4
    bucket.put(key, data)
    assert subscriber.wait_for(5, timeout_s=60) == 5
    assert same_bits(subscriber.mirror.tensors, weights(5))
    assert subscriber.prepare() is None
    assert subscriber.alarm is None
    # Once a version follows, what is damaged is an error: it will not come any more.
    bucket.delete(key)
    publisher.publish(weights(6))
    publisher.close()
    late = Subscriber(bucket, run, load_mirror(bucket, run, at=4), stepwise=stepwise)
    with pytest.raises(CorruptError) as caught:
        late.prepare()
    assert caught.value.key == key


def test_retention_keeps_the_tables_of_what_stays(bucket):
    run = read_run(bucket)
    prune(bucket, run, cutoff=5, grace_s=0)
    found = check_run(bucket)
    assert found.faults == []
    assert found.unreferenced == 0
    assert same_bits(load_mirror(bucket, run).tensors, weights(NEWEST))


def test_a_region_gets_the_tables(bucket):
    destination = open_bare_bucket("memory://")
    relay = Relay(bucket, destination, start=0)
    relay.advance()
    relay.close()
    assert check_run(destination).faults == []
    assert same_bits(load_mirror(destination, read_run(bucket)).tensors, weights(NEWEST))
