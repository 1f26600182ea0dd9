"""The publisher: what it refuses, what it copies, what it says."""

import threading

import numpy as np
import pytest

from deltawire import codec
from deltawire.errors import InputError, RetryError
from deltawire.store import open_bucket
from deltawire.sync import chain, load_mirror, read_manifest
from deltawire.testing.faulty import FaultyBucket, disk_full
from deltawire.testing.tiny import TENSORS, audit, same_bits, start_publisher, weights
from deltawire.wire import keys


@pytest.fixture
def bucket():
    return FaultyBucket(open_bucket("memory://"))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(chain, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def publisher(bucket):
    publisher = start_publisher(bucket)
    yield publisher
    publisher.close()


def wrong(version):
    """Models that are not the run's, each with what its refusal must name."""
    good = weights(version)
    name = "embed.weight"
    yield {k: v for k, v in good.items() if k != name}, name
    yield {**good, "extra": good[name]}, "extra"
    yield {}, "norm"
    yield {**good, name: good[name].T.copy()}, name
    yield {**good, name: good[name].reshape(-1)}, name
    yield {**good, name: good[name][:-1].copy()}, name
    yield {**good, "scale": good["scale"].reshape(1)}, "scale"
    yield {**good, name: np.asfortranarray(good[name])}, "contiguous"
    yield {**good, name: good[name].astype(np.uint32)}, "U32"
    yield {**good, "mask": good["mask"].astype(np.float16)}, "F16"
    yield {**good, name: good[name].astype(">u2")}, "byte order"
    yield {**good, name: good[name].tolist()}, "list"


def test_a_wrong_model_is_refused_and_nothing_is_harmed(bucket, publisher):
    publisher.publish(weights(0))
    publisher.flush()
    before = len(bucket.operations)
    count = 0
    for tensors, word in wrong(1):
        with pytest.raises(InputError, match=word):
            publisher.publish(tensors)
        count += 1
    assert count == 12
    assert len(bucket.operations) == before
    assert publisher.version == 0
    assert publisher.publish(weights(1)) == 1
    publisher.flush()
    assert audit(bucket, weights) == 1


def test_what_the_caller_does_behind_publish_does_not_matter(bucket, publisher):
    gate = threading.Event()
    publisher._pool.submit(gate.wait)
    tensors = weights(0)
    publisher.publish(tensors)
    for array in tensors.values():
        array.fill(1)
    gate.set()
    publisher.flush()
    assert audit(bucket, weights) == 0


def test_real_dtypes_are_taken_as_they_are(bucket, publisher):
    good = weights(0)
    floats = {
        **good,
        "norm": good["norm"].view(np.float32),
        "scale": good["scale"].view(np.float32),
        "steps": good["steps"].view(np.int64),
        "mask": (good["mask"] % 2).astype(bool),
    }
    publisher.publish(floats)
    publisher.flush()
    expected = {**good, "mask": good["mask"] % 2}
    assert audit(bucket, lambda version: expected) == 0


def test_anchors_come_when_they_are_due(bucket):
    publisher = start_publisher(bucket, anchor_every=3)
    for version in range(8):
        assert publisher.publish(weights(version)) == version
    publisher.close()
    run = publisher.run
    manifests = [read_manifest(bucket, run, version) for version in range(8)]
    assert [m.version for m in manifests if m.anchor is not None] == [0, 3, 6]
    assert [m.base for m in manifests] == [None, 0, 1, 2, 3, 4, 5, 6]
    assert manifests[0].delta is None
    assert all(m.delta is not None for m in manifests[1:])
    assert len({m.nonce for m in manifests}) == 8


def test_no_change_at_all_is_a_version_too(bucket, publisher):
    for _ in range(3):
        publisher.publish(weights(0))
    publisher.flush()
    manifest = read_manifest(bucket, publisher.run, 2)
    assert manifest.delta.blobs == []
    assert manifest.delta.changed == 0
    assert audit(bucket, lambda version: weights(0)) == 2


def test_receipts_tell_what_was_committed(bucket):
    receipts = []
    publisher = start_publisher(bucket)
    publisher._on_commit = receipts.append
    for version in range(4):
        publisher.publish(weights(version))
    publisher.close()
    full = sum(codec.unsigned_of(s.dtype).itemsize * s.count for s in TENSORS)
    elements = sum(s.count for s in TENSORS)
    for version, receipt in enumerate(receipts):
        manifest = read_manifest(bucket, publisher.run, version)
        assert receipt.version == version
        assert receipt.digest == manifest.digest
        assert (receipt.bytes_full, receipt.elements) == (full, elements)
        assert receipt.bytes_delta == (manifest.delta.bytes if version else 0)
        assert receipt.bytes_anchor == (manifest.anchor.bytes if version % 3 == 0 else 0)
        old, new = weights(max(version - 1, 0)), weights(version)
        changed = sum(int((old[name] != new[name]).sum()) for name in new)
        assert receipt.changed == (changed if version else elements)
        assert min(receipt.blocked_ms, receipt.encode_ms, receipt.upload_ms) >= 0
    assert len(receipts) == 4
    assert publisher.digest.hex() == receipts[-1].digest


def test_annexes_are_committed_with_their_version(bucket, publisher):
    publisher.publish(weights(0), annex={"step": 0})
    publisher.publish(weights(1), annex={"consumed": [["w", 3]]})
    publisher.publish(weights(2))
    publisher.flush()
    annexes = [read_manifest(bucket, publisher.run, version).annex for version in range(3)]
    assert annexes == [{"step": 0}, {"consumed": [["w", 3]]}, {}]


def test_a_failure_is_raised_by_the_next_call_and_only_once(bucket, publisher):
    publisher.publish(weights(0))
    publisher.flush()
    bucket.fail("create", error=disk_full)
    assert publisher.publish(weights(1)) == 1
    with pytest.raises(InputError, match="lack of space"):
        publisher.publish(weights(2))
    assert publisher.version == 0
    assert publisher.publish(weights(3)) == 1
    publisher.flush()
    publisher.flush()
    assert audit(bucket, lambda version: weights(3) if version else weights(0)) == 1


def test_close_raises_what_was_under_way_and_ends_the_thread(bucket):
    publisher = start_publisher(bucket)
    bucket.fail("create", times=None)
    publisher.publish(weights(0))
    with pytest.raises(RetryError):
        publisher.close()
    assert not any(thread.is_alive() for thread in publisher._pool._threads)
    publisher.close()


def test_the_receipts_failure_does_not_undo_the_version(bucket):
    publisher = start_publisher(bucket)

    def fail(receipt):
        raise InputError("the caller's own")

    publisher._on_commit = fail
    publisher.publish(weights(0))
    with pytest.raises(InputError, match="own"):
        publisher.flush()
    publisher._on_commit = None
    assert publisher.version == 0
    assert publisher.publish(weights(1)) == 1
    publisher.close()
    assert audit(bucket, weights) == 1


def test_blobs_come_before_their_manifest(bucket, publisher):
    for version in range(4):
        publisher.publish(weights(version))
    publisher.flush()
    seen = set()
    for verb, key in bucket.operations:
        if verb != "create":
            continue
        seen.add(key)
        number = keys.trailing_number(key) if key.startswith(keys.MANIFESTS) else None
        if number is not None:
            manifest = read_manifest(bucket.inner, publisher.run, number)
            for payload in filter(None, (manifest.delta, manifest.anchor)):
                assert {keys.blob(ref.hash) for ref in payload.blobs} <= seen
    assert keys.manifest(3) in seen


def test_nan_payloads_and_negative_zeros_survive(bucket, publisher):
    first, second = weights(0), weights(0)
    odd = {
        "embed.weight": [0x8000, 0x7FC1, 0xFFFF, 0x7F81, 0x0000, 0x7F80],
        "norm": [0x80000000, 0x7F800001, 0xFFC00123, 0],
    }
    for name, bits in odd.items():
        first[name].reshape(-1)[: len(bits)] = 0
        second[name].reshape(-1)[: len(bits)] = bits
    both = [first, second]
    for tensors in both:
        publisher.publish(tensors)
    publisher.flush()
    assert audit(bucket, lambda version: both[version]) == 1
    mirror = load_mirror(bucket, publisher.run)
    for name, bits in odd.items():
        assert mirror.tensors[name][: len(bits)].tolist() == bits
    assert not same_bits(first, second)
