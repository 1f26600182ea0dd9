"""Through a store that takes time: requests overlap, and no cost grows with what is old."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock

import msgspec
import numpy as np
import pytest
from anchored import anchor_of
from shard_ranks import RANKS, close, publish_all, rank_publisher

from deltawire.errors import FencedError, InputError
from deltawire.store import REQUESTS, open_bare_bucket
from deltawire.sync import Relay, load_mirror, open_publisher, prune, read_manifest
from deltawire.sync.chain import gc_intents
from deltawire.sync.follow import fetch
from deltawire.sync.maintain import blob_copies
from deltawire.sync.publish import anchors, encoding
from deltawire.sync.publish.sharded import WAITING_REQUESTS_PER_S, waiting_pause_s
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.simulated import SimulatedBucket
from deltawire.testing.tiny import audit, start_publisher, start_run, weights
from deltawire.wire import keys, piece_table
from deltawire.wire.coordination import DeletionIntent, RetentionFloor
from deltawire.wire.run import encode_run
from deltawire.wire.seal import seal

BLOBS = 40


@pytest.fixture
def many_blobs():
    """A run whose version 1 has a blob for each of its tensors."""
    inner = open_bare_bucket("memory://")
    tensors = {f"{n:03d}": np.arange(256, dtype=np.uint16) for n in range(BLOBS)}
    publisher = open_publisher(inner, tensors, anchor_every=0, compaction_strides=(), blob_bytes=1)
    mirror = load_mirror(inner, publisher.run)
    publisher.publish({name: bits ^ np.uint16(3) for name, bits in tensors.items()})
    publisher.close()
    return inner, publisher.run, mirror


def test_a_reader_fetches_many_blobs_at_once(many_blobs):
    inner, run, mirror = many_blobs
    bucket = SimulatedBucket(inner, latency_s=0.01)
    assert load_mirror(bucket, run, into=mirror).version == 1
    assert 2 < bucket.most_at_once <= REQUESTS
    assert bucket.requests["get"] <= BLOBS + 4
    assert (mirror.tensors["007"] == np.arange(256, dtype=np.uint16) ^ np.uint16(3)).all()


@pytest.mark.parametrize("limit", [1, 600])
def test_the_blobs_in_memory_are_bounded(many_blobs, monkeypatch, limit):
    """One blob is fetched while another is decoded, and more only below the limit."""
    inner, run, mirror = many_blobs
    monkeypatch.setattr(fetch, "AHEAD_BYTES", limit)
    largest = max(entry.bytes for entry in inner.list_objects(keys.BLOBS))
    bucket = SimulatedBucket(inner, latency_s=0.002)
    assert load_mirror(bucket, run, into=mirror).version == 1
    assert bucket.most_at_once <= max(2, limit // min(largest, 100))


class _UploadsBucket(SimulatedBucket):
    """Also has the largest number of blobs that were stored together."""

    def __init__(self, inner, **options):
        super().__init__(inner, **options)
        self.most_uploads, self._uploads, self._counting = 0, 0, Lock()

    def put(self, key, data):
        with self._counting:
            self._uploads += key.startswith(keys.BLOBS)
            self.most_uploads = max(self.most_uploads, self._uploads)
        super().put(key, data)
        with self._counting:
            self._uploads -= key.startswith(keys.BLOBS)


def test_uploads_overlap_and_are_bounded(monkeypatch):
    def most(limit):
        monkeypatch.setattr(encoding, "UPLOAD_BYTES", limit)
        bucket = _UploadsBucket(open_bare_bucket("memory://"), latency_s=0.005)
        tensors = {f"{n:02d}": np.arange(256, dtype=np.uint16) for n in range(24)}
        open_publisher(bucket, tensors, blob_bytes=1, compaction_strides=()).close()
        return bucket.most_uploads

    assert 1 < most(1 << 20) <= encoding.UPLOADS
    assert most(1) == 1


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_a_relay_copies_many_blobs_at_once(many_blobs, monkeypatch, limit):
    """Between two remote stores, as many as fit into its memory."""
    inner, run, _ = many_blobs
    monkeypatch.setattr(blob_copies, "COPIED_BYTES", limit)
    source = SimulatedBucket(inner, latency_s=0.02)
    target = SimulatedBucket(open_bare_bucket("memory://other"), latency_s=0.002)
    relay = Relay(source, target, start=0)
    relay.step()
    source.most_at_once = 0
    relay.step()
    relay.close()
    assert relay.version == 1
    assert source.most_at_once <= 2 if limit == 1 else source.most_at_once > 2
    assert load_mirror(target, run).version == 1
    assert set(target.list(keys.BLOBS)) == set(inner.list(keys.BLOBS))


def test_one_writer_stores_its_piece_table_once(monkeypatch):
    bucket = SimulatedBucket(open_bare_bucket("memory://"), latency_s=0.0)
    monkeypatch.setattr(piece_table, "INLINE_BYTES", 16)
    bits = np.arange(1 << 12, dtype=np.uint16)
    publisher = open_publisher(
        bucket, {"w": bits}, chunk=256, anchor_every=0, compaction_strides=()
    )
    before = bucket.requests["put"]
    publisher.publish({"w": bits ^ np.uint16(1)})
    publisher.flush()
    publisher.close()
    assert bucket.requests["put"] - before == 3  # A blob of pieces, their table, the announcement.
    assert not read_manifest(bucket, publisher.run, 1).delta.table.inline


def test_ranks_commit_through_a_slow_store():
    inner = open_bare_bucket("memory://")
    bucket = SimulatedBucket(inner, latency_s=0.002)
    publishers = [rank_publisher(bucket, rank) for rank in range(RANKS)]
    for version in range(2):
        assert publish_all(publishers, version) == [None] * RANKS
    close(publishers)
    assert audit(inner, weights) == 1
    assert not inner.list(keys.PARTS)


def test_waiting_ranks_stay_below_the_store_s_limit():
    assert waiting_pause_s(0.5, 8, 0.5) == 0.5
    slow = waiting_pause_s(0.5, 2000, 0.5)
    assert 2 * 2000 / slow <= WAITING_REQUESTS_PER_S
    assert waiting_pause_s(0.5, 8, 0.0) < 0.5 < waiting_pause_s(0.5, 8, 1.0)


def test_retention_does_not_read_old_tombstones():
    """A second call reads what is new and one window, not every version that was pruned."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket)
    for version in range(151):
        publisher.publish(weights(version % 3))
    publisher.close()
    run = start_run(bucket)
    assert len(prune(bucket, run, cutoff=141, grace_s=0).manifests) == 141
    del bucket.operations[:]
    found = prune(bucket, run, cutoff=147, grace_s=0)
    assert found.manifests == [*range(141, 147)]
    read = {key for verb, key in bucket.operations if verb == "get"}
    assert sum(key.startswith(keys.MANIFESTS) for key in read) < 60


@pytest.mark.parametrize("items", [0, 1, 300])
def test_small_items_are_handed_over_in_batches(items):
    """In order, each batch bounded in items and in elements, a large item by itself."""
    sizes = [5 if number % 7 else fetch.BATCH_ELEMENTS + 1 for number in range(items)]
    found = list(fetch.batches(sizes, lambda size: size))
    assert [size for batch in found for size in batch] == sizes
    for batch in found:
        assert len(batch) <= fetch.BATCH_ITEMS
        assert sum(batch) <= fetch.BATCH_ELEMENTS or len(batch) == 1
    with ThreadPoolExecutor(2) as pool:
        doubled = fetch.in_batches(
            pool, lambda n: 2 * n, range(items), elements=lambda _: 1, ahead=2
        )
        assert list(doubled) == [2 * number for number in range(items)]


def test_many_small_tensors_of_several_dtypes_arrive():
    rng = np.random.default_rng(0)
    dtypes = (np.float32, np.uint16, np.int64, np.uint8)
    first = {f"{n:03d}": rng.integers(0, 100, 9).astype(dtypes[n % 4]) for n in range(300)}
    bucket = open_bare_bucket("memory://")
    publisher = open_publisher(bucket, first, compaction_strides=())
    later = {
        name: bits if number % 3 else bits + 1 for number, (name, bits) in enumerate(first.items())
    }
    publisher.publish(later)
    publisher.close()
    mirror = load_mirror(bucket, publisher.run)
    assert mirror.version == 1
    for name, bits in later.items():
        assert mirror.tensors[name].tobytes() == bits.tobytes()


@pytest.mark.parametrize("near", [0, 3, 256])
@pytest.mark.parametrize("local", [True, False])
def test_the_newest_anchor_is_found_in_few_rounds(monkeypatch, near, local):
    monkeypatch.setattr(anchors, "NEAR", near)
    inner = open_bare_bucket("memory://")
    publisher = start_publisher(inner, anchor_every=20)
    for version in range(39):
        publisher.publish(weights(version % 3))
    publisher.close()
    run = start_run(inner)
    bucket = inner if local else SimulatedBucket(inner, latency_s=0.005)
    _, expected = anchor_of(inner, run, 20)
    found = anchors.find_anchor(bucket, run, newest=38)
    assert (found.bytes, len(found.pieces)) == (expected.bytes, expected.table.pieces)
    assert (
        anchors.find_anchor(bucket, run, newest=19).bytes
        == read_manifest(inner, run, 0).anchor.bytes
    )
    inner.put(keys.compacted(None, 20), b"damaged")
    assert (
        anchors.find_anchor(bucket, run, newest=38).bytes
        == read_manifest(inner, run, 0).anchor.bytes
    )
    if not local:
        assert bucket.most_at_once > 1


class _CommittingBucket(SimulatedBucket):
    """Calls ``committed`` once the next version, after it was set, has its manifest. From then on
    it answers in waves of these ``sizes``: no request of a wave before all of it are asked, and
    with an error if they are not."""

    def __init__(self, inner, sizes=()):
        super().__init__(inner, latency_s=0.0)
        self.committed, self.asked = None, None
        self._lock_of_waves = Lock()
        self._waves = iter([one for size in sizes for one in [Barrier(size, timeout=20)] * size])

    def _call(self, verb, key, operation):
        if self.asked is not None:
            with self._lock_of_waves:
                self.asked.append((verb, key))
                wave = next(self._waves, None)
            if wave is not None:
                wave.wait()
            return super()._call(verb, key, operation)
        done = super()._call(verb, key, operation)
        if self.committed is not None and verb == "create" and key.startswith(keys.MANIFESTS):
            self.committed()
            self.asked = []
        return done


def test_what_a_commit_checks_afterwards_is_asked_together():
    """The run's description, the floors and retention's announcements, then the blobs: a store
    that refuses some requests makes a commit late by two of them, not by five."""
    bucket = _CommittingBucket(open_bare_bucket("memory://"), [4, 4])
    rng = np.random.default_rng(0)
    first, second = (
        {f"{n:02d}": rng.integers(1 << 16, size=256, dtype=np.uint16) for n in range(4)}
        for _ in range(2)
    )
    publisher = open_publisher(bucket, first, anchor_every=0, compaction_strides=(), blob_bytes=1)
    bucket.committed = lambda: None
    publisher.publish(second, wait=True)
    asked = sorted((verb, key.partition("/")[0]) for verb, key in bucket.asked[:4])
    publisher.close()
    assert asked == [("head", "run.json"), *[("list", "weights")] * 3]
    assert [verb for verb, _ in bucket.asked[4:]] == ["head"] * 4


@pytest.mark.parametrize("what", ["closed", "foreign"])
def test_a_writer_that_may_not_go_on_hears_it_before_it_waits_for_a_deletion(monkeypatch, what):
    inner = open_bare_bucket("memory://")
    bucket = _CommittingBucket(inner)
    tensors = {"w": np.arange(256, dtype=np.uint16)}
    publisher = open_publisher(bucket, tensors, anchor_every=0, compaction_strides=())
    run, waited = publisher.run, []
    monkeypatch.setattr(gc_intents, "_wait_for", lambda _, entry: waited.append(entry.key))

    def announce():
        blobs = [key.removeprefix(keys.BLOBS) for key in inner.list(keys.BLOBS)]
        put_sealed(inner, keys.deletion_intent("a"), DeletionIntent(run=run.id, blobs=blobs))
        if what == "closed":
            put_sealed(inner, keys.retention_floor(2), RetentionFloor(run=run.id, version=2))
            inner.put(keys.manifest(2), b"of a rival")
        else:
            inner.put(keys.RUN, encode_run(msgspec.structs.replace(run, id="0" * 32)))

    def put_sealed(place, key, value):
        place.put(key, seal(value, key=key))

    bucket.committed = announce
    publisher.publish({"w": tensors["w"] ^ np.uint16(1)})
    with pytest.raises(FencedError if what == "closed" else InputError):
        publisher.close()
    assert waited == []
