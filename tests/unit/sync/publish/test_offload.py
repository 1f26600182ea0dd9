"""Publishers whose copies lie in files: the same objects, wrong input, and what a kill leaves."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from shard_ranks import RANKS, close, cut, publish_all, rank_publisher, shards

from deltawire import codec
from deltawire.config.machine import POLICY, machine_policy
from deltawire.errors import InputError, RetryError
from deltawire.store import RetryingBucket, open_bare_bucket, retrying
from deltawire.sync import load_mirror, open_publisher, read_run
from deltawire.sync.publish import offload
from deltawire.sync.publish.lazy_tensor import LazyTensor
from deltawire.sync.publish.sharded import load_ranges
from deltawire.sync.publish.sources import continue_publisher
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import TENSORS, audit, same_bits, start_run, weights
from deltawire.wire.run import TensorSpec

OPTIONS = {"run_id": "5" * 32, "specs": TENSORS, "chunk": 64, "compaction_strides": ()}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture(params=[1, offload.RESIDENT_BYTES], ids=["always-dropped", "kept"])
def _resident(request, monkeypatch):
    """The bits must not depend on when pages are given back."""
    monkeypatch.setattr(offload, "RESIDENT_BYTES", request.param)


def publish_versions(folder):
    """Publishes versions with anchors, one in part, and some after a restart; returns all payload
    objects."""
    bucket = open_bare_bucket("memory://")
    start = weights(0)
    publisher = open_publisher(bucket, start, anchor_every=2, snapshot_dir=folder, **OPTIONS)
    publisher.publish(weights(1))
    publisher.publish({"norm": weights(2)["norm"]}, partial=True)
    publisher.publish(weights(3))
    publisher.wait_for_anchor()
    publisher.close()
    again = continue_publisher(bucket, anchor_every=2, snapshot_dir=folder, compaction_strides=())
    again.publish({"norm": weights(4)["norm"]}, partial=True)
    again.publish(weights(5))
    again.close()
    again.close()  # Once more does no harm.
    assert same_bits(load_mirror(bucket, read_run(bucket)).tensors, weights(5))
    return {
        key: bucket.get(key, limit=1 << 20) for key in bucket.list("") if "blobs/" in key
    }, again.digest


@pytest.mark.usefixtures("_resident")
def test_the_published_bytes_are_those_of_a_publisher_in_memory(tmp_path):
    in_memory, digest = publish_versions(None)
    on_disk, same = publish_versions(tmp_path)
    assert len(in_memory) > 5
    assert on_disk == in_memory
    assert same == digest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_resident")
def test_ranks_publish_the_same_from_files(tmp_path):
    """Each rank's ranges begin and end inside chunks."""
    found = []
    for folder in (None, tmp_path):
        bucket = open_bare_bucket("memory://")
        publishers = [rank_publisher(bucket, rank) for rank in range(RANKS)]
        assert publish_all(publishers, 0) == [None] * RANKS
        digest = publishers[0].digest
        close(publishers)
        run = start_run(bucket)
        held = []
        for rank in range(RANKS):
            ranges = {
                spec.name: (cut(spec, rank)[0], cut(spec, rank)[1] - cut(spec, rank)[0])
                for spec in TENSORS
                if spec.name in shards(0, rank)
            }
            held.append(load_ranges(bucket, run, ranges, at=0, snapshot_dir=folder))
        again = []
        for rank, mirror in enumerate(held):
            again.append(
                rank_publisher(
                    bucket, rank, epoch=1, session="s1", mirror=mirror, version=0, digest=digest
                )
            )
        for version in (1, 2, 3):
            assert publish_all(again, version) == [None] * RANKS
        close(again)
        assert audit(bucket, weights) == 3
        found.append({key for key in bucket.list("") if "blobs/" in key})
    assert found[0] == found[1]
    assert list(tmp_path.iterdir()) == []


class Counted(LazyTensor):
    """Counts up from zero, and remembers the largest part that was asked for."""

    def __init__(self, count):
        self.spec = TensorSpec("w", (count,), "BF16")
        self.most = 0

    def read_into(self, target, start=0):
        self.most = max(self.most, target.size)
        target[:] = np.arange(start, start + target.size)


def test_lazy_tensors_are_read_in_parts(tmp_path):
    lazy = Counted(10_000_000)
    bucket = open_bare_bucket(str(tmp_path / "run"), create=True)
    publisher = open_publisher(bucket, {"w": lazy}, specs=[lazy.spec], snapshot_dir=tmp_path)
    publisher.close()
    assert 0 < lazy.most <= 1 << 23
    whole = np.arange(10_000_000).astype(np.uint16)
    assert publisher.digest == codec.digest_bits("w", whole)


def refusal(bucket, folder, tensors=None, **options):
    with pytest.raises(InputError) as caught:
        open_publisher(bucket, tensors or weights(0), snapshot_dir=folder, **{**OPTIONS, **options})
    text = str(caught.value)
    assert str(folder) in text
    assert "snapshot_dir" in text
    assert list(bucket.list("")) == []  # No run was made.
    return text


def test_folders_that_cannot_hold_the_copies(tmp_path, monkeypatch):
    bucket = open_bare_bucket("memory://")
    assert "no folder" in refusal(bucket, tmp_path / "missing")
    (tmp_path / "file").write_text("")
    assert "no folder" in refusal(bucket, tmp_path / "file")
    huge = Counted(1 << 45)
    assert "free" in refusal(bucket, tmp_path, {"w": huge}, specs=[huge.spec])

    def read_only(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(offload, "tempfile", SimpleNamespace(TemporaryFile=read_only))
    assert "Read-only" in refusal(bucket, tmp_path)


def test_a_disk_that_fills_up_between_the_check_and_the_reservation(tmp_path, monkeypatch):
    bucket = open_bare_bucket("memory://")
    real = offload.reserve

    def full(file, size):
        if size > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, size)

    monkeypatch.setattr(offload, "reserve", full)
    with pytest.raises(InputError, match="No space left") as caught:
        open_publisher(bucket, weights(0), snapshot_dir=tmp_path, **OPTIONS)
    assert "snapshot_dir" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(offload, "reserve", real)
    open_publisher(bucket, weights(0), snapshot_dir=tmp_path, **OPTIONS).close()
    assert audit(bucket, weights) == 0


def test_a_failed_version_is_published_again_from_files(tmp_path):
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = open_publisher(RetryingBucket(bucket), weights(0), snapshot_dir=tmp_path, **OPTIONS)
    bucket.fail("put", "*/blobs/*", times=None)
    publisher.publish(weights(1, seed=9))
    with pytest.raises((RetryError, InputError)):
        publisher.flush()
    bucket.heal()
    assert publisher.publish(weights(1)) == 1
    publisher.close()
    assert audit(bucket, weights) == 1


KILLED = """
import os, signal, sys
from deltawire.sync import open_publisher
from deltawire.testing.tiny import TENSORS, weights
publisher = open_publisher("memory://", weights(0), specs=TENSORS, snapshot_dir=sys.argv[1])
publisher.publish(weights(1))
print(len(os.listdir(sys.argv[1])), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_publisher_leaves_no_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.strip() == "0"
    assert list(tmp_path.iterdir()) == []


def test_the_machine_names_the_folder(tmp_path, monkeypatch):
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    monkeypatch.setenv(POLICY, str(policy))
    assert machine_policy().publisher_dir("none") is None
    with pytest.raises(InputError, match="snapshot_dir"):
        machine_policy().publisher_dir("disk")
    policy.write_text('snapshot_dir = "/mnt/nvme"')
    assert machine_policy().publisher_dir("disk") == Path("/mnt/nvme")
    assert machine_policy().publisher_dir("none") is None
