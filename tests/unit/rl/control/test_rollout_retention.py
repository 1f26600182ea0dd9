"""Retention of groups: interrupted, continued, bounded in time."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.scale.versions import make_run
from deltawire.errors import RetryError
from deltawire.rl.control.rollout_retention import TRIM_S, RolloutRetention
from deltawire.runtime.retained import read_retained
from deltawire.store import DelegatingBucket
from deltawire.sync import read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.manifest import encode_manifest

VERSIONS = 9


class FailingBucket(DelegatingBucket):
    """Fails from the ``left``-th deletion on."""

    left = 1 << 30

    def delete(self, key):
        self.left -= 1
        if self.left < 0:
            raise RetryError("no answer", run=self.url, key=key)
        super().delete(key)


@pytest.fixture
def bucket():
    inner = make_run(VERSIONS)
    run = read_run(inner)
    for version in range(1, VERSIONS):
        groups = [("w0", 2 * version), ("w0", 2 * version + 1)]
        for group in groups:
            inner.put(keys.rollout(*group), b"")
        manifest = read_manifest(inner, run, version)
        metadata = CommitMetadata(step=version, consumed=groups).to_dict()
        changed = msgspec.structs.replace(manifest, metadata=metadata)
        inner.put(keys.manifest(version), encode_manifest(changed))
    return FailingBucket(inner)


def kept(bucket):
    return sorted({keys.group_of(key)[1] // 2 for key in bucket.list(keys.ROLLOUTS)})


def test_a_trim_that_was_interrupted_anywhere_is_completed_by_the_next(bucket):
    for left in range(14):
        bucket.left = left
        with pytest.raises(RetryError):
            RolloutRetention(bucket, read_run(bucket), keep=1).trim(
                newest=VERSIONS - 1, oldest_checkpoint=VERSIONS - 1
            )
        floor = read_retained(bucket).rollouts
        assert set(range(floor, VERSIONS)) <= set(kept(bucket)), "kept versions keep their groups"
        bucket.left = 1 << 30
        if floor > 4:
            break
    RolloutRetention(bucket, read_run(bucket), keep=1).trim(
        newest=VERSIONS - 1, oldest_checkpoint=VERSIONS - 1
    )
    assert kept(bucket) == [VERSIONS - 1]


def test_a_trim_that_takes_long_is_continued_by_the_next(bucket):
    times = iter(range(0, 10_000, round(0.4 * TRIM_S)))
    retention = RolloutRetention(bucket, read_run(bucket), keep=1, clock=lambda: float(next(times)))
    deleted = []
    while kept(bucket) != [VERSIONS - 1]:
        deleted.append(retention.trim(newest=VERSIONS - 1, oldest_checkpoint=VERSIONS - 1))
        assert deleted[-1], "each trim deletes something"
    assert len(deleted) > 1
