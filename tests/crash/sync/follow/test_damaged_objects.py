"""One bit flipped in each object of a run in turn: always noticed, never served."""

import random

import pytest
from anchored import anchor_of

from deltawire.errors import CorruptError
from deltawire.store import open_bare_bucket
from deltawire.sync import Subscriber, find_run, load_mirror, read_manifest, read_run
from deltawire.sync.chain.objects import get_blob, put_blob
from deltawire.sync.chain.payloads import read_blobs
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import same_bits, start_publisher, weights
from deltawire.wire import keys

LAST = 4
FLIPS = 12


@pytest.fixture(scope="module")
def bucket():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=3)
    for version in range(LAST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


def load(bucket, version):
    """ "right" or "noticed"; anything else is an assertion that fails."""
    try:
        run = read_run(bucket)
        mirror = load_mirror(bucket, run, at=version)
    except CorruptError:
        return "noticed"
    assert mirror.version == version
    assert same_bits(mirror.tensors, weights(version))
    return "right"


def follow(bucket, run, mirror):
    """Follow as far as it goes; the bits held on the way are right, and what stops it is told."""
    subscriber = Subscriber(bucket, run, mirror)
    while True:
        try:
            update = subscriber.prepare()
        except CorruptError:
            return "noticed"
        if update is None:
            return "right" if mirror.version == LAST else "noticed"
        subscriber.commit(update)
        assert same_bits(mirror.tensors, weights(mirror.version))


def needed(bucket, run, version):
    """The blobs without which a version cannot be had in any way."""
    manifests = [read_manifest(bucket.inner, run, number) for number in range(version + 1)]
    anchor = max(
        m.version for m in manifests if anchor_of(bucket.inner, run, m.version) is not None
    )
    return {
        keys.blob(r.hash) for m in manifests[anchor + 1 :] for r in read_blobs(bucket, run, m.delta)
    }


def test_there_is_something_to_damage(bucket):
    kinds = [key.rsplit("/", 1)[0] for key in bucket.list("")]
    assert kinds.count("weights/blobs") == LAST + 2
    assert kinds.count("weights/manifests") == LAST + 1
    assert kinds.count("run.json") == 1


def test_undamaged_all_is_right(bucket):
    run = read_run(bucket)
    assert [load(bucket, version) for version in range(LAST + 1)] == ["right"] * (LAST + 1)
    assert follow(bucket, run, load_mirror(bucket, run, at=0)) == "right"


@pytest.mark.parametrize("number", range(LAST + 2 + LAST + 1 + 1))
def test_one_bit_in_each_object(bucket, number):
    key = bucket.list("")[number]
    size = 8 * len(bucket.get(key, limit=1 << 20))
    run = read_run(bucket)
    start = load_mirror(bucket, run, at=0)
    places = random.Random(number)
    is_blob = key.startswith(keys.BLOBS)
    for _ in range(FLIPS if is_blob else 4 * FLIPS):
        place = places.randrange(size)
        bucket.damage(key, lambda data, place=place: flip_bit(data, place))
        try:
            for version in (0, 3, LAST):
                found = load(bucket, version)
                if is_blob and key in needed(bucket, run, version):
                    assert found == "noticed"
            follow(bucket, run, start.copy())
        finally:
            bucket.heal()


def test_every_bit_of_run_and_manifests():
    """They are sealed: not one bit can turn unnoticed, be it in commit metadata or a name."""
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=3)
    publisher.publish(weights(0), metadata={"free": "form"})
    publisher.publish(weights(1))
    publisher.close()
    run = read_run(bucket)
    for key, read in (
        (keys.RUN, lambda: find_run(bucket)),
        (keys.manifest(0), lambda: read_manifest(bucket, run, 0)),
        (keys.manifest(1), lambda: read_manifest(bucket, run, 1)),
    ):
        assert read() is not None
        for place in range(8 * bucket.inner.size(key)):
            bucket.damage(key, lambda data, place=place: flip_bit(data, place))
            with pytest.raises(CorruptError):
                read()
            bucket.heal()


def test_every_bit_of_a_blob(bucket):
    run = read_run(bucket)
    manifest = read_manifest(bucket, run, LAST)
    (ref,) = read_blobs(bucket, run, manifest.delta)
    for place in range(0, 8 * ref.bytes, 5):
        bucket.damage(keys.blob(ref.hash), lambda data, place=place: flip_bit(data, place))
        assert load(bucket, LAST) == "noticed"
        bucket.heal()


def test_a_damaged_blob_is_repaired_by_publishing_it_again(bucket):
    """An object that already has a blob's name is not trusted."""
    ref = put_blob(bucket, b"the right bytes")
    bucket.put(keys.blob(ref.hash), b"the wrong bytes")
    with pytest.raises(CorruptError):
        get_blob(bucket, ref)
    assert put_blob(bucket, b"the right bytes") == ref
    assert get_blob(bucket, ref) == b"the right bytes"
    bucket.delete(keys.blob(ref.hash))
