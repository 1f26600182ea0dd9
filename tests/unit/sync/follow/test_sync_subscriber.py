"""The subscriber and `load_mirror`: along the chain, around what is damaged, never wrong."""

import msgspec
import numpy as np
import pytest
from anchored import anchor_of

from deltawire import codec
from deltawire.errors import CorruptError, ResyncError, RetryError
from deltawire.store import DelegatingBucket, RetryingBucket, open_bare_bucket, retrying
from deltawire.sync import Subscriber, load_mirror, read_manifest
from deltawire.sync.chain.objects import put_blob
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.follow.fetch import piece_hash
from deltawire.sync.follow.load import fetch_anchor
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import same_bits, start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest, encode_manifest
from deltawire.wire.payload import Payload, Piece
from deltawire.wire.piece_table import encode_table, payload_ref
from deltawire.wire.run import Run, TensorSpec

NEWEST = 7
ANCHORS = (0, 3, 6)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def bucket():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=3)
    for version in range(NEWEST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


@pytest.fixture
def run(bucket):
    return start_run(bucket)


def blob_key(bucket, run, version, kind):
    manifest = read_manifest(bucket.inner, run, version)
    anchored = anchor_of(bucket.inner, run, version)
    payload = manifest.delta if kind == "delta" else anchored[1]
    (ref,) = read_blobs(bucket.inner, run, payload)
    return keys.blob(ref.hash)


def rewrite(bucket, run, version, **changes):
    # Without the checks, because it may have been rewritten before.
    data = bucket.inner.get(keys.manifest(version), limit=1 << 20)
    manifest = msgspec.json.decode(data, type=Manifest)
    changed = msgspec.structs.replace(manifest, **changes)
    bucket.inner.put(keys.manifest(version), encode_manifest(changed))


def subscriber_at(bucket, run, version, **options):
    return Subscriber(
        RetryingBucket(bucket),
        run,
        load_mirror(bucket.inner, run, at=version),
        **{"stepwise": True, **options},
    )


def state(mirror):
    tensors = {name: bits.tobytes() for name, bits in mirror.tensors.items()}
    return tensors, mirror.version, mirror.digest


def assert_holds(mirror, version):
    assert mirror.version == version
    assert same_bits(mirror.tensors, weights(version))
    assert mirror.digest == codec.digest_model(mirror.tensors)


def test_version_by_version(bucket, run):
    subscriber = subscriber_at(bucket, run, 0, stepwise=True)
    for version in range(1, NEWEST + 1):
        before = state(subscriber.mirror)
        update = subscriber.prepare()
        assert (update.base, update.version) == (version - 1, version)
        manifest = read_manifest(bucket, run, version)
        assert update.bytes == manifest.delta.bytes
        assert state(subscriber.mirror) == before
        old, new = weights(version - 1), weights(version)
        for name in new:
            wanted = np.flatnonzero(old[name].reshape(-1) != new[name].reshape(-1))
            found = update.patches[name].positions if name in update.patches else []
            assert np.array_equal(found, wanted)
        subscriber.commit(update)
        assert_holds(subscriber.mirror, version)
    before = state(subscriber.mirror)
    assert subscriber.prepare() is None
    assert state(subscriber.mirror) == before


def test_preparing_twice_is_preparing_once(bucket, run):
    subscriber = subscriber_at(bucket, run, 2)
    first, second = subscriber.prepare(), subscriber.prepare()
    assert first.digest == second.digest
    subscriber.commit(second)
    assert_holds(subscriber.mirror, 3)


@pytest.mark.parametrize("version", range(NEWEST + 1))
def test_any_version_can_be_loaded(bucket, run, version):
    assert_holds(load_mirror(bucket, run, at=version), version)


def test_the_newest_is_loaded_by_default(bucket, run):
    assert_holds(load_mirror(bucket, run), NEWEST)


def test_a_mirrors_copy_is_its_own(bucket, run):
    mirror = load_mirror(bucket, run, at=1)
    copy = mirror.copy()
    subscriber = Subscriber(bucket, run, copy, stepwise=True)
    subscriber.commit(subscriber.prepare())
    assert_holds(mirror, 1)
    assert_holds(copy, 2)


DAMAGES = {
    "hidden": None,
    "one bit": lambda data: flip_bit(data, 77),
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}


def spoil(bucket, key, how):
    if DAMAGES[how] is None:
        bucket.hide(key)
    else:
        bucket.damage(key, DAMAGES[how])


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_anchor_is_passed_over_for_an_older_one(bucket, run, how):
    for gone in (6, 3):
        spoil(bucket, blob_key(bucket, run, gone, "anchor"), how)
        assert_holds(load_mirror(bucket, run), NEWEST)
        assert_holds(load_mirror(bucket, run, at=gone), gone)
    spoil(bucket, blob_key(bucket, run, 0, "anchor"), how)
    for version in range(NEWEST + 1):
        with pytest.raises(CorruptError, match="blob"):
            load_mirror(bucket, run, at=version)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_delta_is_avoided_with_a_newer_anchor(bucket, run, how):
    spoil(bucket, blob_key(bucket, run, 5, "delta"), how)
    subscriber = subscriber_at(bucket, run, 4)
    before = state(subscriber.mirror)
    update = subscriber.prepare()
    assert state(subscriber.mirror) == before
    assert (update.base, update.version) == (4, ANCHORS[-1])
    subscriber.commit(update)
    assert subscriber.advance()
    assert_holds(subscriber.mirror, NEWEST)
    with pytest.raises(CorruptError, match="blob"):
        load_mirror(bucket, run, at=5)
    assert_holds(load_mirror(bucket, run), NEWEST)


@pytest.mark.parametrize("how", DAMAGES)
def test_the_version_of_a_damaged_delta_may_be_an_anchor_itself(bucket, run, how):
    spoil(bucket, blob_key(bucket, run, 6, "delta"), how)
    bucket.hide(keys.manifest(7))
    subscriber = subscriber_at(bucket, run, 5)
    update = subscriber.prepare()
    assert (update.base, update.version) == (5, 6)
    subscriber.commit(update)
    assert_holds(subscriber.mirror, 6)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_delta_without_a_newer_anchor_is_an_error(bucket, run, how):
    key = blob_key(bucket, run, 7, "delta")
    spoil(bucket, key, how)
    subscriber = subscriber_at(bucket, run, 6)
    before = state(subscriber.mirror)
    for _ in range(2):
        with pytest.raises(CorruptError) as caught:
            subscriber.prepare()
        assert (caught.value.key, caught.value.version) == (key, 7)
    assert state(subscriber.mirror) == before
    bucket.heal()
    subscriber.commit(subscriber.prepare())
    assert_holds(subscriber.mirror, 7)


class StoredAgain(DelegatingBucket):
    """A store in which the blob at ``key`` is missing until a reader has looked for it
    ``answers`` times: its writer stores it again then."""

    def __init__(self, inner, key, answers):
        super().__init__(inner)
        self.key, self.answers = key, answers
        self.data = inner.get(key, limit=1 << 20)
        inner.delete(key)

    def _looked_for(self, key):
        if key == self.key:
            self.answers -= 1
            if self.answers < 0:
                self.inner.put(key, self.data)

    def get(self, key, *, limit):
        self._looked_for(key)
        return super().get(key, limit=limit)

    def read_ranges(self, key, ranges):
        self._looked_for(key)
        return super().read_ranges(key, ranges)

    def head(self, key):
        self._looked_for(key)
        return super().head(key)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("to", [None, NEWEST])
def test_a_blob_that_its_writer_stores_again_is_looked_for_again(bucket, run, stepwise, to):
    store = StoredAgain(bucket, blob_key(bucket, run, NEWEST, "delta"), answers=1)
    subscriber = subscriber_at(store, run, NEWEST - 1, stepwise=stepwise)
    update = subscriber.prepare() if to is None else subscriber.prepare_to(to)
    subscriber.commit(update)
    assert_holds(subscriber.mirror, NEWEST)


def test_a_load_looks_again_for_a_blob_that_its_writer_stores_again(bucket, run):
    store = StoredAgain(bucket, blob_key(bucket, run, NEWEST, "delta"), answers=1)
    assert_holds(load_mirror(store, run, at=NEWEST), NEWEST)


def test_a_damaged_newest_version_leaves_an_older_way_around(bucket, run):
    spoil(bucket, blob_key(bucket, run, 5, "delta"), "hidden")
    spoil(bucket, blob_key(bucket, run, 7, "delta"), "hidden")
    subscriber = subscriber_at(bucket, run, 4)
    update = subscriber.prepare()
    assert update.version == 6
    subscriber.commit(update)
    assert_holds(subscriber.mirror, 6)


@pytest.mark.parametrize("how", ["one bit", "cut", "empty"])
def test_a_damaged_manifest_is_avoided(bucket, run, how):
    spoil(bucket, keys.manifest(5), how)
    subscriber = subscriber_at(bucket, run, 4)
    assert subscriber.advance()
    assert_holds(subscriber.mirror, NEWEST)
    with pytest.raises(CorruptError):
        load_mirror(bucket, run, at=5)


@pytest.mark.parametrize("version", [1, 3, 5])
def test_a_wrong_digest_is_refused(bucket, run, version):
    # The bit count of a flipped digit differs in either lane.
    digest = read_manifest(bucket, run, version).digest
    for lane in (0, 31):
        wrong = digest[:lane] + f"{int(digest[lane], 16) ^ 1:x}" + digest[lane + 1 :]
        rewrite(bucket, run, version, digest=wrong)
        with pytest.raises(CorruptError, match="digest"):
            load_mirror(bucket, run, at=version)
        subscriber = subscriber_at(bucket, run, version - 1)
        assert subscriber.advance()
        assert_holds(subscriber.mirror, NEWEST)


def test_a_newest_version_with_a_wrong_digest_is_not_there_yet_and_raises_an_alarm(bucket, run):
    whole = bucket.inner.get(keys.manifest(NEWEST), limit=1 << 20)
    rewrite(bucket, run, NEWEST, digest="0" * 32)
    subscriber = subscriber_at(bucket, run, NEWEST - 1)
    assert subscriber.prepare() is None
    assert "digest" in subscriber.alarm.message
    assert_holds(load_mirror(bucket, run), NEWEST - 1)
    with pytest.raises(CorruptError, match="digest"):
        load_mirror(bucket, run, at=NEWEST)
    bucket.inner.put(keys.manifest(NEWEST), whole)
    assert subscriber.wait_for(NEWEST, timeout_s=120) == NEWEST
    assert subscriber.alarm is None
    assert_holds(subscriber.mirror, NEWEST)


def test_an_anchors_digest_is_checked_without_a_delta(bucket, run):
    rewrite(bucket, run, 0, digest="0" * 32)
    with pytest.raises(CorruptError, match="digest"):
        load_mirror(bucket, run, at=0)


def test_a_delta_of_another_version_is_refused(bucket, run):
    other, own = read_manifest(bucket, run, 4), read_manifest(bucket, run, 5)
    rewrite(bucket, run, 5, delta=other.delta)
    with pytest.raises(CorruptError):
        load_mirror(bucket, run, at=5)
    rewrite(bucket, run, 5, delta=own.delta, base=3)
    with pytest.raises(CorruptError, match="builds on the digest"):
        load_mirror(bucket, run, at=5)
    assert subscriber_at(bucket, run, 4).prepare().version == ANCHORS[-1]


def test_a_missing_manifest_is_named(bucket, run):
    bucket.hide(keys.manifest(4))
    update = subscriber_at(bucket, run, 3).prepare()
    assert update.version > 4, "it waits for a manifest that is lost"
    with pytest.raises(CorruptError, match="manifest is missing") as caught:
        load_mirror(bucket, run, at=5)
    assert caught.value.version == 4
    assert_holds(load_mirror(bucket, run), NEWEST)


def test_fetch_anchor_of_a_version_without_one(bucket, run):
    with pytest.raises(ResyncError, match="not an anchor"):
        fetch_anchor(bucket, run, read_manifest(bucket, run, 1), None, empty_mirror(run))


def test_a_store_that_does_not_answer_changes_nothing(bucket, run):
    subscriber = subscriber_at(bucket, run, 2)
    before = state(subscriber.mirror)
    for at in (1, 2):
        bucket.fail(at=at, times=retrying.RETRIES + 1)
        with pytest.raises(RetryError):
            subscriber.prepare()
        bucket.heal()
    assert state(subscriber.mirror) == before
    subscriber.commit(subscriber.prepare())
    assert_holds(subscriber.mirror, 3)


def test_pieces_in_blobs_of_any_order():
    """Builds what this publisher does not write yet but the format allows: ranks that write
    apart.
    """
    bucket = open_bare_bucket("memory://")
    specs = [TensorSpec("a", (10,), "BF16"), TensorSpec("b", (6,), "F32")]
    rng = np.random.default_rng(5)
    old = {"a": rng.integers(0, 9, 10).astype("u2"), "b": rng.integers(0, 9, 6).astype("u4")}
    new = {"a": old["a"].copy(), "b": old["b"].copy()}
    new["a"][[0, 3, 4, 9]] ^= 0x8001
    new["b"][5] ^= 1
    digests = [codec.digest_model(tensors).hex() for tensors in (old, new)]
    run = Run(id="ab" * 16, name="r", created_at=0.0, tensors=specs, digest=digests[0])
    cuts = [(1, 0, 6), (0, 4, 6), (0, 0, 4)]

    def payload(encode):
        blobs, pieces = [], []
        for number, (tensor, start, count) in enumerate(cuts):
            name, part = "ab"[tensor], slice(start, start + count)
            coded, total = encode(name, part, start)
            blobs.append(put_blob(bucket, b"pad" * number + coded))
            place = (number, 3 * number, len(coded))
            pieces.append(Piece(tensor, start, count, *place, total.hex(), piece_hash(coded)))
        ascending = sorted(pieces, key=lambda piece: (piece.tensor, piece.start))
        found = Payload(blobs, ascending)
        return payload_ref(found, encode_table(found, run))

    def whole(name, part, start):
        return codec.encode_full(old[name][part]), codec.digest_bits(name, old[name][part], start)

    def change(name, part, start):
        before, after = old[name][part], new[name][part]
        digests = [codec.digest_bits(name, bits, start) for bits in (before, after)]
        return codec.encode(before, after), digests[1] - digests[0]

    anchor, delta = payload(whole), payload(change)
    common = {"run": run.id, "epoch": 0, "nonce": "n", "created_at": 0.0}
    for manifest in (
        Manifest(version=0, anchor=anchor, digest=digests[0], **common),
        Manifest(
            version=1, base=0, base_digest=digests[0], delta=delta, digest=digests[1], **common
        ),
    ):
        bucket.put(keys.manifest(manifest.version), encode_manifest(manifest))
    assert same_bits(load_mirror(bucket, run, at=0).tensors, old)
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=0))
    update = subscriber.prepare()
    assert update.patches["a"].positions.tolist() == [0, 3, 4, 9]
    subscriber.commit(update)
    assert same_bits(subscriber.mirror.tensors, new)
    assert same_bits(load_mirror(bucket, run).tensors, new)


@pytest.mark.parametrize("held", range(NEWEST + 1))
@pytest.mark.parametrize("wanted", range(NEWEST + 1))
def test_exactly_the_version_asked_for(bucket, run, held, wanted):
    subscriber = subscriber_at(bucket, run, held)
    while (update := subscriber.prepare_to(wanted)) is not None:
        before = state(subscriber.mirror)
        assert min(held, wanted) <= update.version <= max(held, wanted)
        assert state(subscriber.mirror) == before
        subscriber.commit(update)
        assert_holds(subscriber.mirror, update.version)
    assert_holds(subscriber.mirror, wanted)


def test_a_version_that_is_not_there_is_named_and_nothing_moves(bucket, run):
    subscriber = subscriber_at(bucket, run, 2)
    before = state(subscriber.mirror)
    with pytest.raises(CorruptError) as caught:
        subscriber.prepare_to(NEWEST + 1)
    assert caught.value.version == NEWEST + 1
    assert state(subscriber.mirror) == before


def test_around_a_damaged_delta_to_the_version_asked_for(bucket, run):
    bucket.inner.delete(blob_key(bucket, run, 4, "delta"))
    subscriber = subscriber_at(bucket, run, 3)
    before = state(subscriber.mirror)
    with pytest.raises(CorruptError, match="blob"):
        subscriber.prepare_to(4)
    assert state(subscriber.mirror) == before
    while (update := subscriber.prepare_to(6)) is not None:
        subscriber.commit(update)
    assert_holds(subscriber.mirror, 6)


def test_a_mirror_is_compared_with_its_versions_manifest_before_it_is_used(bucket, run):
    """One of another line of the run, at the right number: other bits, honestly digested."""
    other = open_bare_bucket("memory://")
    publisher = start_publisher(other, seed=5)
    for version in range(NEWEST + 1):
        publisher.publish(weights(version, seed=5))
    publisher.close()
    for held in (3, NEWEST):
        wrong = load_mirror(other, publisher.run, at=held)
        with pytest.raises(ResyncError, match="does not hold the digest"):
            Subscriber(bucket, run, wrong.copy()).prepare()
        found = load_mirror(bucket, run, at=held, into=wrong)
        assert_holds(found, held)
        wrong = load_mirror(other, publisher.run, at=held)
        assert_holds(load_mirror(bucket, run, into=wrong), NEWEST)
