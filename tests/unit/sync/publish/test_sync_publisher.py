"""The publisher: refusals, copies, commits and statistics."""

import itertools
import threading
from contextlib import closing, nullcontext

import msgspec
import numpy as np
import pytest
from anchored import anchor_of

from deltawire import codec
from deltawire.errors import FencedError, InputError, RetryError
from deltawire.store import open_bare_bucket, retrying
from deltawire.sync import Publisher, create_run, load_mirror, open_publisher, read_manifest
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.testing.faulty import FaultyBucket, disk_full
from deltawire.testing.tiny import (
    TENSORS,
    audit,
    same_bits,
    start_publisher,
    start_run,
    weights,
)
from deltawire.wire import keys


@pytest.fixture
def bucket():
    return FaultyBucket(open_bare_bucket("memory://"))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture(params=["memory", "disk"])
def publisher(bucket, request, tmp_path):
    publisher = start_publisher(bucket, snapshot_dir=tmp_path if request.param == "disk" else None)
    yield publisher
    publisher.close()


def wrong(version):
    """Yield models that are not the run's, each with the word that its refusal must name."""
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


def test_changes_to_the_arrays_after_publish_do_not_matter(bucket, publisher):
    gate = threading.Event()
    publisher._commits._pool.submit(gate.wait)
    tensors = weights(0)
    publisher.publish(tensors)
    for array in tensors.values():
        array.fill(1)
    gate.set()
    publisher.flush()
    assert audit(bucket, weights) == 0


def test_real_dtypes_are_taken_as_they_are(bucket, publisher):
    good = weights(0)
    publisher.publish(good)
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
    assert audit(bucket, lambda version: expected if version else good) == 1


def test_anchors_come_when_they_are_due(bucket):
    publisher = start_publisher(bucket, anchor_every=3)
    for version in range(8):
        assert publisher.publish(weights(version)) == version
        publisher.wait_for_anchor()
    publisher.close()
    run = publisher.run
    manifests = [read_manifest(bucket, run, version) for version in range(8)]
    assert [m.version for m in manifests if m.anchor is not None] == [0]
    assert [v for v in range(8) if anchor_of(bucket, run, v) is not None] == [0, 3, 6]
    assert [m.base for m in manifests] == [None, 0, 1, 2, 3, 4, 5, 6]
    assert manifests[0].delta is None
    assert all(m.delta is not None for m in manifests[1:])
    assert len({m.nonce for m in manifests}) == 8


def test_no_change_at_all_is_a_version_too(bucket, publisher):
    for _ in range(3):
        publisher.publish(weights(0))
    publisher.flush()
    manifest = read_manifest(bucket, publisher.run, 2)
    assert read_blobs(bucket, publisher.run, manifest.delta) == []
    assert audit(bucket, lambda version: weights(0)) == 2


def test_stats_describe_the_commit(bucket):
    receipts, anchors = [], []
    publisher = start_publisher(bucket, on_commit=receipts.append, on_anchor=anchors.append)
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
        assert receipt.bytes_anchor == (0 if version else manifest.anchor.bytes)
        old, new = weights(max(version - 1, 0)), weights(version)
        changed = sum(int((old[name] != new[name]).sum()) for name in new)
        assert receipt.changed == (changed if version else elements)
        assert min(receipt.blocked_ms, receipt.encode_ms, receipt.upload_ms) >= 0
    assert len(receipts) == 4
    (made,) = anchors
    _, stated = anchor_of(bucket, publisher.run, 3)
    assert (made.version, made.bytes_anchor, made.error) == (3, stated.bytes, "")
    assert publisher.digest.hex() == receipts[-1].digest


def test_metadata_is_committed_with_its_version(bucket, publisher):
    publisher.publish(weights(0), metadata={"step": 0})
    publisher.publish(weights(1), metadata={"consumed": [["w", 3]]})
    publisher.publish(weights(2))
    publisher.flush()
    all_metadata = [read_manifest(bucket, publisher.run, version).metadata for version in range(3)]
    assert all_metadata == [{"step": 0}, {"consumed": [["w", 3]]}, {}]


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


def test_close_raises_the_pending_error_and_ends_the_thread(bucket):
    publisher = start_publisher(bucket)
    bucket.fail("create", times=None)
    publisher.publish(weights(0))
    with pytest.raises(RetryError):
        publisher.close()
    assert not any(thread.is_alive() for thread in publisher._commits._pool._threads)
    publisher.close()


def test_a_failing_callback_does_not_undo_the_version(bucket):
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
        if verb not in ("create", "put"):
            continue
        seen.add(key)
        number = keys.trailing_number(key) if key.startswith(keys.MANIFESTS) else None
        if number is not None:
            manifest = read_manifest(bucket.inner, publisher.run, number)
            for payload in filter(None, (manifest.delta, manifest.anchor)):
                assert {
                    keys.blob(ref.hash) for ref in read_blobs(bucket, publisher.run, payload)
                } <= seen
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
    both = [weights(0), first, second]
    for tensors in both:
        publisher.publish(tensors)
    publisher.flush()
    assert audit(bucket, lambda version: both[version]) == 2
    mirror = load_mirror(bucket, publisher.run)
    for name, bits in odd.items():
        assert mirror.tensors[name][: len(bits)].tolist() == bits
    assert not same_bits(first, second)


@pytest.mark.parametrize("there", [False, True], ids=["new", "existing"])
def test_no_publish_touches_memory_for_the_first_time(there):
    """The first write to a page costs the trainer several times its copy."""
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "RUSAGE_THREAD"):
        pytest.skip("page faults are not counted by thread here")

    def faults():
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    bucket = open_bare_bucket("memory://")
    tensors = {"w": np.ones(1 << 22, np.uint32)}
    if there:
        open_publisher(bucket, tensors, compaction_strides=()).close()
    publisher = open_publisher(bucket, tensors, compaction_strides=())
    for _ in range(3):
        before = faults()
        publisher.publish(tensors)
        taken = faults() - before
        publisher.flush()
        assert taken < 400  # Of 4096 pages; Python itself takes a few.
    publisher.close()


def test_the_first_version_must_be_the_runs(bucket, publisher):
    """Readers compare version 0 with run.json: one that differs would stop all of them."""
    publisher.publish(weights(1))
    with pytest.raises(InputError, match=r"run\.json"):
        publisher.flush()
    assert publisher.version == -1
    publisher.publish(weights(0))
    publisher.flush()
    assert audit(bucket, weights) == 0


def test_an_interrupt_while_waiting_loses_nothing(bucket, publisher, monkeypatch):
    publisher.publish(weights(0))
    publisher.flush()
    gate = threading.Event()
    publisher._commits._pool.submit(gate.wait)
    publisher.publish(weights(1))
    real = publisher._commits.pending.result

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(publisher._commits.pending, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publisher.flush()
    monkeypatch.setattr(publisher._commits.pending, "result", real)
    gate.set()
    assert publisher.publish(weights(2)) == 2
    publisher.flush()
    assert audit(bucket, weights) == 2


def test_an_unanswered_attempt_that_lands_late(bucket, publisher):
    """Its create was delayed: the weights after it get the next number."""
    publisher.publish(weights(0))
    publisher.flush()
    held = []
    real = bucket.inner.create
    bucket.inner.create = lambda key, data: held.append((key, data)) or real("stray/0", b"")
    bucket.fail("create", "*/manifests/*", times=None, done=True)
    publisher.publish(weights(1))
    with pytest.raises(RetryError):
        publisher.flush()
    bucket.inner.create = real
    bucket.heal()
    assert publisher.publish(weights(1, seed=4)) == 1
    # Only now does the first attempt reach the store, before or after the second.
    first = real(*held[0])
    with pytest.raises(InputError, match="committed late") if first else nullcontext():
        publisher.flush()
    assert publisher.publish(weights(2)) == 2
    publisher.flush()
    landed = weights(1) if first else weights(1, seed=4)
    assert audit(bucket, lambda v: landed if v == 1 else weights(v)) == 2


def test_a_late_attempt_found_at_the_commit_is_adopted(bucket, publisher):
    publisher.publish(weights(0))
    publisher.flush()
    held = []
    real = bucket.inner.create

    def swallow(key, data):
        held.append((key, data))
        return True

    bucket.inner.create = swallow
    bucket.fail("create", "*/manifests/*", times=None, done=True)
    publisher.publish(weights(1))
    with pytest.raises(RetryError):
        publisher.flush()
    bucket.heal()

    def landing(key, data):
        bucket.inner.create = real
        assert real(*held[0])
        return real(key, data)

    bucket.inner.create = landing
    assert publisher.publish(weights(1, seed=4)) == 1
    with pytest.raises(InputError, match="committed late"):
        publisher.flush()
    assert publisher.version == 1
    assert publisher.publish(weights(2)) == 2
    publisher.flush()
    assert audit(bucket, weights) == 2


def test_a_fenced_publisher_raises_on_every_later_call(bucket, publisher):
    publisher.publish(weights(0))
    publisher.flush()
    rival = start_publisher(bucket)
    rival.publish(weights(1))
    rival.close()
    publisher.publish(weights(1, seed=3))
    with pytest.raises(FencedError):
        publisher.flush()
    before = len(bucket.operations)
    for _ in range(3):
        with pytest.raises(FencedError):
            publisher.publish(weights(1, seed=3))
    assert len(bucket.operations) == before


def test_a_publisher_refuses_a_mirror_that_is_not_the_runs_head(bucket):
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.close()
    mirror = load_mirror(bucket, publisher.run)
    mirror.tensors["norm"][0] ^= 1
    with pytest.raises(InputError, match="digest"):
        Publisher(bucket, publisher.run, mirror, epoch=1, compaction_strides=())
    mirror.digest = mirror.compute_held()
    other = Publisher(bucket, publisher.run, mirror, epoch=1, compaction_strides=())
    other.publish(weights(1))
    with pytest.raises(FencedError, match="base is not a version"):
        other.close()


def test_a_large_delta_is_many_blobs_of_bounded_size(bucket):
    publisher = start_publisher(bucket, blob_bytes=40, threads=2)
    for version in range(4):
        publisher.publish(weights(version))
    publisher.close()
    chunk = 50 * 4 + 64
    for version in range(4):
        manifest = read_manifest(bucket, publisher.run, version)
        for payload in filter(None, (manifest.delta, manifest.anchor)):
            assert len(read_blobs(bucket, publisher.run, payload)) > 2
            assert all(ref.bytes < 40 + chunk for ref in read_blobs(bucket, publisher.run, payload))
    assert audit(bucket, weights) == 3


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("wire.payload.MAX_PIECES", 2),
        ("wire.payload.MAX_BLOBS", 0),
        ("sync.chain.objects.MAX_MANIFEST_BYTES", 500),
    ],
)
def test_manifests_beyond_the_limits_are_not_committed(bucket, monkeypatch, limit, value):
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.flush()
    with monkeypatch.context() as patch:
        patch.setattr(f"deltawire.{limit}", value)
        publisher.publish(weights(1))
        with pytest.raises(
            InputError, match=r"no reader would accept this version|readers accept 500"
        ):
            publisher.flush()
    assert publisher.publish(weights(1)) == 1
    publisher.close()
    assert audit(bucket, weights) == 1


def test_tied_weights_that_differ_are_refused(bucket):
    """The run has one tensor for both names: one of the two would be lost silently."""
    embed, other = np.arange(6.0).reshape(2, 3), np.ones(4)
    with closing(open_publisher(bucket, {"embed": embed, "head": embed, "x": other})) as publisher:
        assert publisher.run.aliases == {"head": "embed"}
        assert publisher.publish({"embed": embed + 1, "head": embed + 1, "x": other}) == 1
        assert publisher.publish({"head": embed + 2, "x": other}) == 2
        for pair in ({"embed": embed, "head": embed + 1}, {"head": embed + 1, "embed": embed}):
            with pytest.raises(InputError, match="tensor embed is tied"):
                publisher.publish({**pair, "x": other})
        with pytest.raises(InputError, match="has shape"):
            publisher.publish({"embed": embed, "head": embed.reshape(3, 2), "x": other})
    assert (
        load_mirror(bucket, publisher.run).tensors["embed"].view("f8") == embed.ravel() + 2
    ).all()


def test_anchors_by_share_and_over_restarts(bucket):
    restarts, last = (2, 5, 6), 14
    publisher = start_publisher(bucket, anchor_every=0, anchor_share=1.0)
    for version in range(last):
        if version in restarts:
            publisher.close()
            publisher = start_publisher(bucket, anchor_every=0, anchor_share=1.0)
        publisher.publish(weights(version))
        publisher.wait_for_anchor()
    publisher.close()
    manifests = [read_manifest(bucket, publisher.run, version) for version in range(last)]
    anchors = {
        m.version: found[1].bytes
        for m in manifests
        if (found := anchor_of(bucket, publisher.run, m.version)) is not None
    }
    assert 2 < len(anchors) < last
    for first, second in itertools.pairwise(anchors):
        deltas = [m.delta.bytes for m in manifests[first + 1 : second + 1]]
        assert sum(deltas) > anchors[first]
        assert sum(deltas[:-1]) <= anchors[first]
    assert audit(bucket, weights) == last - 1


def test_tied_names_are_stored_once(bucket):
    run = start_run(bucket)
    tied = msgspec.structs.replace(run, id="f" * 32, aliases={"lm_head": "embed.weight"})
    bucket = open_bare_bucket("memory://")
    other = create_run(bucket, tied)
    blank = empty_mirror(other)
    publisher = Publisher(bucket, other, blank, epoch=0, compaction_strides=())
    tensors = weights(0)
    publisher.publish({**tensors, "lm_head": tensors["embed.weight"]})
    renamed = {("lm_head" if n == "embed.weight" else n): t for n, t in weights(1).items()}
    publisher.publish(renamed)
    publisher.close()
    assert same_bits(load_mirror(bucket, other).tensors, weights(1))


def test_frozen_tensors_have_one_copy_and_a_change_of_one_is_published_all_the_same(bucket):
    with closing(start_publisher(bucket)) as first:
        first.publish(weights(0))
    run = first.run
    names = sorted(weights(0))
    frozen, others = {"embed.weight", names[-1]}, [n for n in names[:-1] if n != "embed.weight"]
    opened = Publisher(bucket, run, load_mirror(bucket, run), epoch=2, frozen=frozen)
    with closing(opened) as publisher:
        writer = publisher._writer
        held, staged = writer.baseline.tensors, writer.staging.tensors
        assert {name for name in names if staged[name] is held[name]} == frozen
        publisher.publish({name: weights(1)[name] for name in others}, partial=True)
        publisher.flush()
        mixed = {name: weights(0 if name in frozen else 1)[name] for name in names}
        assert same_bits(load_mirror(bucket, run).tensors, as_held(mixed))
        publisher.publish(weights(2))  # The hint was wrong.
        publisher.flush()
        assert same_bits(load_mirror(bucket, run).tensors, as_held(weights(2)))


def as_held(tensors):
    dtypes = {spec.name: codec.unsigned_of(spec.dtype) for spec in TENSORS}
    return {name: bits.reshape(-1).view(dtypes[name]) for name, bits in tensors.items()}
