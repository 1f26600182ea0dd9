"""One bit flipped in each object of a run in turn: readers err or hold the right bits.

What the digest guards is bits. Names and shapes of tensors without elements, the application's
annex and the run's configuration are outside of it, so only bits are compared here.
"""

import random

import pytest

from deltawire.errors import CorruptError
from deltawire.store import open_bucket
from deltawire.sync import Subscriber, load_mirror, read_manifest, read_run
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import same_bits, start_publisher, weights
from deltawire.wire import keys

LAST = 4
FLIPS = 12


@pytest.fixture(scope="module")
def bucket():
    bucket = FaultyBucket(open_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=3)
    for version in range(LAST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


def with_elements(tensors):
    return {name: bits for name, bits in tensors.items() if bits.size}


def load(bucket, version):
    """ "right" or "noticed"; anything else is an assertion that fails."""
    try:
        run = read_run(bucket)
        mirror = load_mirror(bucket, run, at=version)
    except CorruptError:
        return "noticed"
    assert mirror.version == version
    assert same_bits(with_elements(mirror.tensors), with_elements(weights(version)))
    return "right"


def follow(bucket, run, mirror):
    """Follow as far as it goes; whatever is held on the way has the right bits."""
    subscriber = Subscriber(bucket, run, mirror)
    while True:
        try:
            update = subscriber.prepare()
        except CorruptError:
            return "noticed"
        if update is None:
            assert mirror.version == LAST
            return "right"
        subscriber.commit(update)
        assert same_bits(mirror.tensors, weights(mirror.version))


def needed(bucket, run, version):
    """The blobs without which a version cannot be had in any way."""
    manifests = [read_manifest(bucket.inner, run, number) for number in range(version + 1)]
    anchor = max(m.version for m in manifests if m.anchor is not None)
    return {keys.blob(r.hash) for m in manifests[anchor + 1 :] for r in m.delta.blobs}


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


def test_every_bit_of_a_manifest_that_matters(bucket):
    """Each digit of digest and hash: none of them can be another and go unnoticed."""
    key = keys.manifest(LAST)
    run = read_run(bucket)
    data = bucket.get(key, limit=1 << 20)
    manifest = read_manifest(bucket, run, LAST)
    noticed = 0
    for word in (manifest.digest, manifest.delta.blobs[0].hash):
        start = data.index(word.encode())
        for place in range(8 * start, 8 * (start + len(word)), 7):
            bucket.damage(key, lambda data, place=place: flip_bit(data, place))
            assert load(bucket, LAST) == "noticed"
            bucket.heal()
            noticed += 1
    assert noticed > 100
