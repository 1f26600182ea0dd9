"""Starting a run, finding its newest version, and asking again."""

import msgspec
import pytest

from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.store import open_bare_bucket, retrying
from deltawire.sync import (
    create_run,
    find_run,
    load_mirror,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.objects import (
    get_blob,
    newest_retention_floor,
    put_blob,
    read_retention_floors,
)
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import audit, start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
from deltawire.wire.run import TensorSpec, encode_run
from deltawire.wire.seal import seal


@pytest.fixture
def bucket():
    return FaultyBucket(open_bare_bucket("memory://"))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


def test_no_run_yet(bucket):
    assert find_run(bucket) is None
    assert newest_version(bucket) is None


def test_create_then_take_up_again(bucket):
    run = start_run(bucket)
    again = create_run(bucket, msgspec.structs.replace(run, created_at=5.0, config={"x": 1}))
    assert again == run == find_run(bucket)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "f" * 32},
        {"tensors": [TensorSpec("a", (3,), "F32")]},
        {"tensors": []},
    ],
)
def test_another_model_is_refused(bucket, changes):
    run = start_run(bucket)
    with pytest.raises(InputError, match="another model"):
        create_run(bucket, msgspec.structs.replace(run, **changes))
    assert find_run(bucket) == run


def test_the_same_tensors_in_another_order_are_another_model(bucket):
    run = start_run(bucket)
    with pytest.raises(InputError, match="another model"):
        create_run(bucket, msgspec.structs.replace(run, tensors=run.tensors[::-1]))


def test_another_creates_the_run_in_between(bucket):
    ours = start_run(open_bare_bucket("memory://"))
    theirs = msgspec.structs.replace(ours, created_at=9.0)

    def race(verb, key):
        bucket.inner.put(keys.RUN, encode_run(theirs))
        return RetryError("lost")

    bucket.fail("create", error=race)
    with pytest.raises(RetryError):
        create_run(bucket, ours)
    assert create_run(bucket, ours) == theirs


def test_a_lost_race_takes_up_the_winner(bucket):
    ours = start_run(bucket)
    theirs = msgspec.structs.replace(ours, created_at=9.0)
    bucket.inner.put(keys.RUN, encode_run(theirs))
    first = iter([True])
    real = bucket.get
    # The first read comes before the other's create, the second after it.
    bucket.get = lambda key, *, limit: None if next(first, False) else real(key, limit=limit)
    assert create_run(bucket, ours) == theirs
    other = msgspec.structs.replace(theirs, digest="f" * 32)
    bucket.inner.put(keys.RUN, encode_run(other))
    first = iter([True])
    with pytest.raises(InputError, match="another model"):
        create_run(bucket, ours)


def test_a_run_that_comes_and_goes_is_asked_for_again(bucket):
    run = start_run(bucket)
    bucket.hide(keys.RUN)
    with pytest.raises(RetryError, match=r"run\.json"):
        create_run(bucket, run)


def test_an_unknown_dtype_is_refused(bucket):
    run = start_run(bucket)
    specs = [TensorSpec("a", (2,), "BF17")]
    bucket.inner.put(keys.RUN, encode_run(msgspec.structs.replace(run, tensors=specs)))
    with pytest.raises(CorruptError, match="BF17"):
        find_run(bucket)


def test_newest_version_is_that_of_a_manifest(bucket):
    publisher = start_publisher(bucket)
    for version in range(3):
        publisher.publish(weights(version))
    publisher.close()
    assert newest_version(bucket) == 2
    # Strays: nothing that `read_manifest` would not find may count as a version.
    for stray in ("0000000007.json.bak", "0000000008", "old/0000000009.json", "x.json"):
        bucket.put(f"{keys.MANIFESTS}{stray}", b"{}")
    assert newest_version(bucket) == 2
    assert load_mirror(bucket, publisher.run).version == 2
    assert audit(bucket, weights) == 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tensors": [TensorSpec("a", (1 << 21,), "F32")], "chunk": 1}, "chunks of 1 elements"),
        ({"tensors": [TensorSpec("a", (1 << 50,), "F32")], "chunk": 1 << 30}, "Expected `int`"),
        ({"tensors": [TensorSpec("a" * 1025, (1,), "F32")]}, "length"),
        ({"aliases": {"b": "c"}}, "alias"),
        ({"config": {"a": "x" * (1 << 20)}}, "config has"),
        ({"config": {"a": "x" * (1 << 26)}}, "bytes; the limit is"),
        ({"name": "x" * 65}, "length"),
    ],
)
def test_a_run_that_no_reader_could_read_is_refused(bucket, changes, what):
    """run.json is never written again: the bucket would be lost."""
    run = msgspec.structs.replace(start_run(open_bare_bucket("memory://")), **changes)
    with pytest.raises(InputError, match=what):
        create_run(bucket, run)
    assert bucket.list("") == []


def test_a_retention_floor_is_more_than_its_key(bucket):
    """It must be sealed, of this run, at a committed version, and signed where the run is."""
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.flush()
    run = publisher.run
    for stray in ("0000000007.json.bak", "0000000008", "old/0000000009.json", "x.json"):
        bucket.put(f"{keys.RETENTION_FLOORS}{stray}", b"{}")
    assert read_retention_floors(bucket, run) == ({}, [])
    publisher.publish(weights(1))
    publisher.flush()

    def raise_floor(at, **changes):
        key = keys.retention_floor(at)
        floor = RetentionFloor(**{"run": run.id, "version": at, **changes})
        bucket.put(key, seal(floor, key=key))

    bucket.put(keys.retention_floor(40), b"")
    raise_floor(41)
    raise_floor(1, run="0" * 32)
    raise_floor(0, version=7)
    found = read_retention_floors(bucket, run)
    assert (found.valid, found.newest, len(found.refused)) == ({}, 0, 4)
    publisher.publish(weights(2))
    publisher.close()  # One that counts would have fenced it.
    raise_floor(1)
    assert newest_retention_floor(bucket, run) == 1
    signed = msgspec.structs.replace(run, public_key="0" * 64)
    assert newest_retention_floor(bucket, signed) == 0
    assert newest_retention_floor(bucket, signed, unsigned=True) == 1


def test_a_manifest_that_is_not_there(bucket):
    run = start_run(bucket)
    assert read_manifest(bucket, run, 0) is None
    with pytest.raises(RetryError, match="no version is published yet"):
        load_mirror(bucket, run)
    with pytest.raises(CorruptError, match="manifest is missing"):
        load_mirror(bucket, run, at=3)


def test_blobs_are_verified(bucket):
    ref = put_blob(bucket, b"some bytes")
    assert put_blob(bucket, b"some bytes") == ref
    assert get_blob(bucket, ref) == b"some bytes"
    for change, reason in (
        (lambda data: flip_bit(data, 5), "does not match"),
        (lambda data: data[:-1], "does not match"),
        (lambda data: b"", "does not match"),
    ):
        bucket.damage(keys.blob(ref.hash), change)
        with pytest.raises(CorruptError, match=reason) as caught:
            get_blob(bucket, ref, version=4)
        assert caught.value.key == keys.blob(ref.hash)
        assert caught.value.version == 4
        bucket.heal()
    bucket.hide(keys.blob(ref.hash))
    with pytest.raises(CorruptError, match="missing"):
        get_blob(bucket, ref)
    bucket.heal()
    bucket.put(keys.blob(ref.hash), b"some bytes and more")
    with pytest.raises(CorruptError, match="exceeds the limit"):
        get_blob(bucket, ref)


def test_a_run_that_is_required_is_read_or_its_absence_is_an_error():
    bucket = open_bare_bucket("memory://")
    with pytest.raises(InputError, match="there is no run here") as caught:
        read_run(bucket)
    assert caught.value.key == keys.RUN
    run = start_run(bucket)
    assert read_run(bucket) == run
    with pytest.raises(CorruptError, match="not signed"):
        read_run(bucket, public_key="0" * 64)
