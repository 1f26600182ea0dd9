"""Fail the store at each operation of a publisher whose anchors list earlier blobs again."""

from contextlib import suppress

import numpy as np
import pytest
from anchored import anchor_of, anchor_payload

from deltawire.errors import DeltawireError
from deltawire.store import RetryingBucket, open_bare_bucket, retrying
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync import load_mirror, newest_version, open_publisher
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.publish.sources import continue_publisher
from deltawire.testing.faulty import FaultyBucket, disk_full, no_answer
from deltawire.wire import keys
from deltawire.wire.run import TensorSpec

SIZES = {"adapter": 60, "base.0": 900, "base.1": 900}
SPECS = [TensorSpec(name, (size,), "BF16") for name, size in SIZES.items()]
FROZEN = ("base.0", "base.1")
OPTIONS = {"anchor_every": 2, "compaction_strides": (), "blob_bytes": 1000}
LAST = 4


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


def drawn(names, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 16, SIZES[name]).astype("<u2") for name in names}


def held_at(version):
    return drawn(SIZES, 0) if not version else {**drawn(SIZES, 0), **drawn(["adapter"], version)}


def start(bucket):
    publisher = open_publisher(
        RetryingBucket(bucket), drawn(SIZES, 0), specs=SPECS, frozen=FROZEN, **OPTIONS
    )
    publisher.close()
    return publisher.run


def live(bucket, *, last=LAST, **options):
    publisher = continue_publisher(RetryingBucket(bucket), **OPTIONS, **options)
    try:
        while publisher.version < last:
            publisher.publish(drawn(["adapter"], publisher.version + 1), partial=True)
            publisher.wait_for_anchor()
    finally:
        with suppress(DeltawireError):
            publisher.close()


def anchor_blobs(bucket, run, version):
    return {ref.hash for ref in anchor_payload(bucket, run, version).blobs}


def assert_whole(bucket, run):
    for version in range(newest_version(bucket) + 1):
        found = load_mirror(bucket, run, at=version)
        wanted = held_at(version)
        assert all(np.array_equal(found.tensors[name], wanted[name]) for name in wanted)
    assert check_run(bucket, deep=True).whole


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "error",
    # `test_publisher_faults` has both errors; how an anchor is made does not depend on which it is.
    [no_answer, pytest.param(disk_full, marks=[pytest.mark.drills, pytest.mark.long])],
)
def test_each_operation_in_turn(done, error):
    clean = FaultyBucket(open_bare_bucket("memory://"))
    run = start(clean.inner)
    live(clean)
    assert anchor_blobs(clean.inner, run, 0) & anchor_blobs(clean.inner, run, LAST)
    stored = sum(key.startswith(keys.BLOBS) for verb, key in clean.operations if verb == "put")
    assert stored == 2 * LAST - LAST // 2, "a delta each, and one blob an anchor"
    for at in range(1, len(clean.operations) + 1):
        bucket = FaultyBucket(open_bare_bucket("memory://"))
        run = start(bucket.inner)
        bucket.fail(at=at, times=None, done=done, error=error)
        with suppress(DeltawireError):
            live(bucket)
        assert_whole(bucket.inner, run)
        bucket.heal()
        # An anchor that could not be made is made with the next version.
        live(bucket, last=LAST + 1)
        assert newest_version(bucket.inner) == LAST + 1
        assert_whole(bucket.inner, run)
        (newest, *_) = [v for v in (LAST + 1, LAST) if anchor_of(bucket.inner, run, v) is not None]
        assert anchor_blobs(bucket.inner, run, 0) & anchor_blobs(bucket.inner, run, newest)


class Deleting(DelegatingBucket):
    """Deletes blobs just before an anchor is created, as retention may do."""

    doomed = ()

    def create(self, key, data):
        if key == keys.compacted(None, LAST):
            for name in self.doomed:
                self.inner.delete(keys.blob(name))
            self.doomed = ()
        return super().create(key, data)


def test_a_blob_that_is_deleted_before_the_commit_is_encoded_again():
    bucket = Deleting(open_bare_bucket("memory://"))
    run = start(bucket)
    bucket.doomed = sorted(anchor_blobs(bucket, run, 0))
    live(bucket)
    assert newest_version(bucket) == LAST
    assert load_mirror(bucket, run, at=LAST).version == LAST
    listed = anchor_blobs(bucket, run, LAST)
    assert len(listed & anchor_blobs(bucket, run, 0)) == 2
    assert all(bucket.exists(keys.blob(name)) for name in listed)


def test_a_blob_of_another_encoder_that_is_deleted_is_reported(monkeypatch):
    bucket = Deleting(open_bare_bucket("memory://"))
    run = start(bucket)
    bucket.doomed = sorted(anchor_blobs(bucket, run, 0))
    monkeypatch.setattr(
        "deltawire.sync.publish.anchors.codec",
        _OtherEncoder(),
    )
    anchors = []
    live(bucket, on_anchor=anchors.append)
    assert anchors[0].error == ""
    assert "encoding it again made another" in anchors[-1].error
    assert newest_version(bucket) == LAST


class _OtherEncoder:
    @staticmethod
    def encode_full(bits, dtype, *, threads):
        return b"DWA1" + bits.tobytes()
