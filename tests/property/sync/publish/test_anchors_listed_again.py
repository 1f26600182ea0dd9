"""Anchors list the blobs of the anchor before them, and retention keeps each while it is listed."""

import numpy as np
import pytest
from anchored import anchor_of, anchor_payload
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltawire.store import open_bucket
from deltawire.sync import Relay, load_mirror, newest_version, open_publisher, read_manifest
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.chain.retention import prune
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.publish.sources import continue_publisher
from deltawire.testing.reader import Reader
from deltawire.wire import keys
from deltawire.wire.run import TensorSpec

BASE = {f"base.{number}": 4000 for number in range(6)}
ADAPTER = {f"base.{number}.lora_A": 60 for number in range(6)}
SPECS = [TensorSpec(name, (size,), "BF16") for name, size in sorted({**BASE, **ADAPTER}.items())]


def drawn(names, seed):
    rng = np.random.default_rng(seed)
    sizes = {**BASE, **ADAPTER}
    return {name: rng.integers(0, 1 << 16, sizes[name]).astype("<u2") for name in sorted(names)}


def everything(seed=0):
    return drawn({**BASE, **ADAPTER}, seed)


def start(bucket, *, frozen=(), **options):
    settings_ = {"anchor_every": 2, "compaction_strides": (), "blob_bytes": 9000, **options}
    return open_publisher(bucket, everything(), specs=SPECS, chunk=1500, frozen=frozen, **settings_)


def blobs(bucket, run, version):
    return {ref.hash: ref.bytes for ref in anchor_payload(bucket, run, version).blobs}


def test_a_frozen_base_crosses_once():
    bucket, stats = open_bucket("memory://"), []
    publisher = start(bucket, frozen=BASE.keys(), on_anchor=stats.append)
    held = everything()
    for version in range(1, 9):
        held |= drawn(ADAPTER, version)
        publisher.publish(drawn(ADAPTER, version), partial=True)
        publisher.wait_for_anchor()
    publisher.close()
    run = publisher.run
    first = blobs(bucket, run, 0)
    base_bytes = 2 * sum(BASE.values())
    for version in (2, 4, 6, 8):
        listed = blobs(bucket, run, version)
        shared = sum(size for name, size in listed.items() if name in first)
        # Random bits do not compress, so the blobs of the base take at least its bytes.
        assert shared >= base_bytes
        assert sum(listed.values()) - shared < 2 * sum(ADAPTER.values()) * 1.5
        assert {one.version: one.bytes_reused for one in stats}[version] == shared
        found = load_mirror(bucket, run, at=version)
        assert found.version == version
    assert all(np.array_equal(found.tensors[name], held[name]) for name in held)
    stored = sum(entry.bytes for entry in bucket.list_objects(keys.BLOBS))
    assert stored < base_bytes * 1.4


def test_without_a_hint_the_base_crosses_twice_at_most():
    bucket, stats = open_bucket("memory://"), []
    publisher = start(bucket, on_anchor=stats.append)
    for version in range(1, 9):
        publisher.publish(drawn(ADAPTER, version), partial=True)
        publisher.wait_for_anchor()
    publisher.close()
    assert [one.version for one in stats] == [2, 4, 6, 8]
    assert [one.bytes_reused > 2 * sum(BASE.values()) * 0.9 for one in stats[1:]] == [True] * 3
    stored = sum(entry.bytes for entry in bucket.list_objects(keys.BLOBS))
    assert stored < 2 * sum(BASE.values()) * 2.4


def test_a_publisher_that_continues_lists_the_base_of_the_one_before():
    bucket, stats = open_bucket("memory://"), []
    start(bucket, frozen=BASE.keys()).close()
    for version in (1, 2):
        publisher = continue_publisher(
            bucket,
            anchor_every=2,
            compaction_strides=(),
            blob_bytes=5000,
            on_anchor=stats.append,
        )
        publisher.publish(drawn(ADAPTER, version), partial=True)
        publisher.close()
    assert stats[-1].bytes_reused >= 2 * sum(BASE.values())


def test_a_base_that_changes_once_is_uploaded_again():
    bucket = open_bucket("memory://")
    publisher = start(bucket, frozen=BASE.keys())
    run, held = publisher.run, everything()
    for version in range(1, 5):
        held |= drawn(BASE if version == 3 else ADAPTER, version)
        publisher.publish(held)
        publisher.wait_for_anchor()
    publisher.close()
    assert blobs(bucket, run, 0).keys() & blobs(bucket, run, 2).keys()
    assert not blobs(bucket, run, 2).keys() & blobs(bucket, run, 4).keys()
    assert check_run(bucket, deep=True).whole
    found = load_mirror(bucket, run, at=4)
    assert all(np.array_equal(found.tensors[name], held[name]) for name in held)


def test_a_lost_blob_is_not_listed_again():
    bucket = open_bucket("memory://")
    publisher = start(bucket, frozen=BASE.keys())
    run = publisher.run
    lost = max(blobs(bucket, run, 0).items(), key=lambda one: one[1])[0]
    bucket.delete(keys.blob(lost))
    for version in (1, 2):
        publisher.publish(drawn(ADAPTER, version), partial=True)
    publisher.close()
    assert load_mirror(bucket, run, at=2).version == 2
    shared = blobs(bucket, run, 0).keys() & blobs(bucket, run, 2).keys()
    assert shared


STEPS = st.lists(
    st.tuples(
        st.sets(st.sampled_from([*BASE, *ADAPTER]), max_size=5),
        st.sampled_from(["", "prune", "restart", "restart and prune"]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=9,
)


@given(steps=STEPS, hint=st.booleans(), blob_bytes=st.sampled_from([2000, 9000, 1 << 20]))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_retention_keeps_what_any_kept_anchor_lists(steps, hint, blob_bytes):
    bucket = open_bucket("memory://")
    frozen = BASE.keys() if hint else ()
    publisher = start(bucket, frozen=frozen, blob_bytes=blob_bytes)
    run, versions, first = publisher.run, [everything()], 0
    for number, (names, action, behind) in enumerate(steps, start=1):
        changed = drawn(names, number)
        versions.append({**versions[-1], **changed})
        publisher.publish(changed, partial=True)
        publisher.wait_for_anchor()
        if "restart" in action:
            publisher.close()
            publisher = continue_publisher(
                bucket, anchor_every=2, compaction_strides=(), blob_bytes=blob_bytes
            )
        if "prune" in action:
            found = prune(bucket, run, cutoff=number - behind, grace_s=0)
            first = max(first, found.pruned_below)
    publisher.close()
    found = prune(bucket, run, cutoff=len(steps), grace_s=0)
    first = max(first, found.pruned_below)
    for version in range(first, len(steps) + 1):
        found = load_mirror(bucket, run, at=version)
        assert all(np.array_equal(found.tensors[n], versions[version][n]) for n in versions[0])
    needed = set()
    for version in range(first, len(steps) + 1):
        manifest = read_manifest(bucket, run, version)
        for ref in manifest.payloads:
            needed |= {one.hash for one in read_payload(bucket, run, manifest, ref).blobs}
        if anchor_of(bucket, run, version) is not None:
            needed |= {one.hash for one in anchor_payload(bucket, run, version).blobs}
    kept = {entry.key.removeprefix(keys.BLOBS) for entry in bucket.list_objects(keys.BLOBS)}
    assert needed == kept
    assert check_run(bucket, deep=True).whole


def test_the_reader_of_the_document_reads_them():
    bucket = open_bucket("memory://")
    publisher = start(bucket, frozen=BASE.keys())
    held = everything()
    for version in range(1, 5):
        held |= drawn(ADAPTER, version)
        publisher.publish(drawn(ADAPTER, version), partial=True)
        publisher.wait_for_anchor()
    publisher.close()
    for version in (0, 1, 2, 3):
        bucket.delete(keys.manifest(version))  # Only the anchor is left, in blobs of version 0.
    found = Reader(lambda key: bucket.get(key, limit=1 << 26)).read(4)
    assert found == {name: bits.tolist() for name, bits in held.items()}


@pytest.mark.parametrize("late", [False, True], ids=["follows", "begins-late"])
def test_a_relay_copies_the_base_once(late):
    source, there = open_bucket("memory://"), open_bucket("memory://")
    publisher = start(source, frozen=BASE.keys())
    if late:
        for version in (1, 2):
            publisher.publish(drawn(ADAPTER, version), partial=True)
        publisher.wait_for_anchor()
    relay = Relay(source, there)
    while relay.step():
        pass
    before = relay.crossed
    first = publisher.next_version
    for version in range(first, first + 6):
        publisher.publish(drawn(ADAPTER, version), partial=True)
    publisher.close()
    while relay.step():
        pass
    relay.close()
    assert relay.crossed - before < sum(BASE.values())
    assert newest_version(there) == first + 5
    found, wanted = (load_mirror(one, publisher.run) for one in (there, source))
    assert all(np.array_equal(found.tensors[n], wanted.tensors[n]) for n in wanted.tensors)
    assert check_run(there, deep=True).whole
