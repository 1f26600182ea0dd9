"""One bit turned in each object where it lies, in turn: noticed, never served, and got around.

If a run is readable without the object, readers avoid it without intervention.
"""

import random

import pytest
from history import LIMIT, snapshot, weights

from deltawire.errors import CorruptError
from deltawire.store import open_bucket
from deltawire.sync import Subscriber, load_mirror, read_manifest, read_run
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import flip_bit
from deltawire.testing.tiny import same_bits, start_publisher
from deltawire.wire import keys

LAST = 9


@pytest.fixture(scope="module")
def original():
    """Anchors at 0 and 6, compacted deltas of strides 2 and 4: every kind of object there is."""
    bucket = open_bucket("memory://")
    publisher = start_publisher(bucket, anchor_every=6, compaction_strides=(2, 4))
    for version in range(LAST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


def names(bucket):
    return [key for key in bucket.list("") if key != keys.CLOCK]


def says_where(error):
    assert error.key or error.version is not None, f"{error} does not say where"


def load(bucket, version):
    """The version, or None if that is not to be had; never other bits."""
    try:
        mirror = load_mirror(bucket, read_run(bucket), at=version)
    except CorruptError as error:
        return says_where(error)
    assert mirror.version == version
    assert same_bits(mirror.tensors, weights(version))
    return mirror


def follow(bucket, run, mirror):
    """Follow with a mirror of version 0; the version where it ends, by itself or by an error."""
    subscriber = Subscriber(bucket, run, mirror)
    while True:
        try:
            update = subscriber.prepare()
        except CorruptError as error:
            says_where(error)
            return mirror.version
        if update is None:
            return mirror.version
        subscriber.commit(update)
        assert same_bits(mirror.tensors, weights(mirror.version))


def test_every_kind_is_there(original):
    found = {key.rsplit("/", 1)[0] for key in names(original)}
    assert found == {"run.json", "weights/manifests", "weights/blobs", "weights/compacted"}


@pytest.mark.parametrize("kind", ["memory", "folder", "s3"])
def test_one_bit_of_each_object(original, new_bucket, kind, drill_seed):
    bucket = new_bucket(kind)
    for key in names(original):
        bucket.put(key, original.get(key, limit=LIMIT))
    run = read_run(original)
    rng = random.Random(drill_seed)
    recovered = 0
    stride = 3 if kind == "s3" else 1  # The slower store; others have each object.
    for key in names(original)[::stride]:
        data = original.get(key, limit=LIMIT)
        without = snapshot(original)
        without.delete(key)
        bucket.put(key, flip_bit(data, rng.randrange(8 * len(data))))
        if kind == "memory" and key != keys.RUN:
            assert key in {fault.key for fault in check_run(bucket).faults}
        for version in (3, 6, LAST):
            found = load(bucket, version)
            # As good as if the object were not there, and no better than if it were whole.
            if key != keys.RUN and load(without, version) is not None:
                assert found is not None, f"{version} can be had without {key}"
                recovered += 1
        start = load_mirror(original, run, at=0)
        reached = follow(bucket, run, start.copy())
        if key != keys.RUN:
            assert reached >= follow(without, run, start.copy())
        bucket.put(key, data)
        assert load(bucket, LAST) is not None
    assert recovered > 25 // stride


def test_every_bit_of_the_objects_of_one_version(original, drill_seed):
    """Of version 3 and the blob that only it needs; one bit in eight, others for each seed."""
    bucket = snapshot(original)
    run = read_run(bucket)
    before = load_mirror(bucket, run, at=2)
    key = keys.manifest(3)
    delta = read_manifest(bucket, run, 3).delta
    blobs = [keys.blob(ref.hash) for ref in read_blobs(bucket, run, delta)]
    assert len(blobs) == 1
    for damaged in (key, *blobs):
        data = bucket.get(damaged, limit=LIMIT)
        for place in range(drill_seed % 8, 8 * len(data), 8):
            bucket.put(damaged, flip_bit(data, place))
            with pytest.raises(CorruptError):
                load_mirror(bucket, run, at=3, into=before.copy())
        bucket.put(damaged, data)


@pytest.mark.parametrize("kind", ["folder", "s3"])
@pytest.mark.parametrize("lost", ["manifest", "anchor", "delta"])
def test_an_object_that_is_gone(original, new_bucket, kind, lost):
    """Readers get past it over compacted deltas and anchors, or say what is missing."""
    bucket = new_bucket(kind)
    for key in names(original):
        bucket.put(key, original.get(key, limit=LIMIT))
    run = read_run(bucket)
    text = {version: original.get(keys.manifest(version), limit=LIMIT) for version in range(LAST)}
    blobs = {
        version: [k for k in names(original) if k[-64:].encode() in text[version]]
        for version in text
    }
    doomed = {
        "manifest": [keys.manifest(3)],
        "anchor": [k for k in blobs[0] if k not in blobs[1]],
        "delta": blobs[3],
    }[lost]
    start = load_mirror(bucket, run, at=1)
    for key in doomed:
        bucket.delete(key)
    assert follow(bucket, run, start) == LAST
    for version in range(6, LAST + 1):
        assert load(bucket, version) is not None
    publisher = start_publisher(bucket)
    assert publisher.publish(weights(LAST + 1)) == LAST + 1
    publisher.close()
    assert load(bucket, LAST + 1) is not None
