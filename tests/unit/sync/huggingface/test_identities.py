"""The index of versions' identities: it spares reads, and is never trusted beyond manifests."""

import numpy as np
import pytest
from checkpoint_dirs import write_directory

from deltawire.errors import CorruptError
from deltawire.store import open_bare_bucket
from deltawire.sync import open_publisher, prune
from deltawire.sync.huggingface import identities
from deltawire.sync.huggingface.identities import IdentityIndex
from deltawire.sync.huggingface.publish_dirs import CheckpointPublisher
from deltawire.testing.faulty import FaultyBucket, half
from deltawire.wire import identities as wire
from deltawire.wire import keys
from deltawire.wire.identities import decode_identities
from deltawire.wire.signing import Ed25519Signer

VERSIONS = 12
SIGNER = Ed25519Signer(bytes([7]) * 32)


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch):
    for module in (wire, identities):
        monkeypatch.setattr(module, "SEGMENT_VERSIONS", 4)
    monkeypatch.setattr(identities, "WRITE_EVERY", 3)


def filled(signer=None, versions=VERSIONS):
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = open_publisher(
        bucket, {"a": np.zeros(8, np.float32)}, compaction_strides=(), signer=signer, anchor_every=4
    )
    for version in range(1, versions):
        publisher.publish({"a": np.full(8, version, np.float32)})
    publisher.close()
    return bucket, publisher.run


def manifests_read(bucket):
    found = sum(verb == "get" and key.startswith(keys.MANIFESTS) for verb, key in bucket.operations)
    del bucket.operations[:]
    return found


@pytest.mark.parametrize("signer", [None, SIGNER], ids=["open", "signed"])
def test_a_second_start_reads_the_index_and_one_manifest(signer):
    bucket, run = filled(signer)
    first = IdentityIndex(bucket, run, signer=signer)
    first.save()
    assert len(bucket.list(keys.IDENTITIES)) == 3
    del bucket.operations[:]
    second = IdentityIndex(bucket, run, signer=signer)
    assert manifests_read(bucket) == 1
    assert list(second.known.items()) == list(first.known.items())
    assert list(second.known) == [*range(VERSIONS)]


def test_only_manifests_that_are_newer_are_read():
    bucket, run = filled()
    IdentityIndex(bucket, run).save()
    open_publisher(bucket, {"a": np.zeros(8, np.float32)}, compaction_strides=()).close()
    publisher = open_publisher(bucket, {"a": np.zeros(8, np.float32)}, compaction_strides=())
    publisher.publish({"a": np.full(8, 50, np.float32)})
    publisher.close()
    del bucket.operations[:]
    assert max(IdentityIndex(bucket, run).known) == VERSIONS
    assert manifests_read(bucket) == 2


@pytest.mark.parametrize("fault", ["cut short", "missing", "junk", "of another run", "set back"])
def test_an_index_that_does_not_hold_is_made_again(fault):
    bucket, run = filled()
    expected = IdentityIndex(bucket, run)
    expected.save()
    there, key = bucket.inner, keys.identities(1)
    if fault == "cut short":
        there.put(key, half(there.get(key, limit=1 << 20)))
    elif fault == "missing":
        there.delete(key)
    elif fault == "junk":
        there.put(keys.identities(9), b"{}")
    elif fault == "of another run":
        there.put(key, there.get(key, limit=1 << 20).replace(run.id.encode(), b"f" * 32))
    else:
        for version in range(6, VERSIONS):
            there.delete(keys.manifest(version))
    again = IdentityIndex(bucket, run)
    listed = {keys.trailing_number(key) for key in there.list(keys.MANIFESTS)}
    assert again.known == {v: one for v, one in expected.known.items() if v in listed}
    again.save()
    del bucket.operations[:]
    assert IdentityIndex(bucket, run).known == again.known
    assert manifests_read(bucket) == 1


def test_an_unsigned_index_counts_nothing_in_a_signed_run():
    bucket, run = filled(SIGNER)
    IdentityIndex(bucket, run).save()
    assert not bucket.list(keys.IDENTITIES)  # Nobody could sign it.
    other, foreign = filled()
    IdentityIndex(other, foreign).save()
    bucket.inner.put(keys.identities(0), other.get(keys.identities(0), limit=1 << 20))
    assert len(IdentityIndex(bucket, run).known) == VERSIONS


def test_a_store_that_fails_costs_only_time():
    bucket, run = filled()
    bucket.fail("put", f"{keys.IDENTITIES}*", times=None)
    index = IdentityIndex(bucket, run)
    index.save()
    bucket.heal()
    index.save()
    assert len(bucket.list(keys.IDENTITIES)) == 3


def test_pruned_versions_stay_known():
    bucket, run = filled()
    before = IdentityIndex(bucket, run)
    before.save()
    assert prune(bucket, run, cutoff=8, grace_s=0).manifests
    assert IdentityIndex(bucket, run).known == before.known


def test_a_segment_of_other_versions_is_refused():
    bucket, run = filled()
    IdentityIndex(bucket, run).save()
    data = bucket.get(keys.identities(1), limit=1 << 20)
    with pytest.raises(CorruptError, match="of another run or place"):
        decode_identities(data, segment=2, table=run, run="r", key=keys.identities(1))


def test_directories_are_recognized_through_the_index(tmp_path):
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    paths = [write_directory(tmp_path / f"step-{step}", step) for step in range(6)]
    with CheckpointPublisher(bucket) as publisher:
        for path in paths:
            assert publisher.publish(path).published
    assert bucket.list(keys.IDENTITIES)
    del bucket.operations[:]
    with CheckpointPublisher(bucket) as publisher:
        assert manifests_read(bucket) <= 3
        assert [publisher.publish(path).version for path in paths] == [*range(6)]
        assert [publisher.publish(path).state for path in paths] == ["there"] * 6


def test_a_dry_run_writes_no_index(tmp_path):
    bucket, _ = filled()
    with CheckpointPublisher(bucket, dry_run=True):
        pass
    assert not bucket.list(keys.IDENTITIES)
