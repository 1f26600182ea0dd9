"""Runs of earlier releases are read, published into, and continued by this one."""

import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from deltawire import codec
from deltawire.builds import build_name
from deltawire.dashboard.status import Watch
from deltawire.rl.evaluate.audit import audit_fates
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.needs import config_of
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, newest_version, read_manifest, read_run
from deltawire.sync.publish.sources import continue_publisher

KEPT = Path(__file__).parent / "kept"
PATIENCE_S = 600.0


@pytest.fixture(params=sorted(path.name.removesuffix(".tar.xz") for path in KEPT.glob("*.tar.xz")))
def bucket(request, tmp_path):
    """The bucket of a run that a release left when it was interrupted."""
    with tarfile.open(KEPT / f"{request.param}.tar.xz") as packed:
        packed.extractall(tmp_path / "bucket", filter="data")
    return open_bucket(str(tmp_path / "bucket"))


def test_there_is_one_of_0_1_0():
    assert (KEPT / "0.1.0.tar.xz").is_file()


@pytest.mark.parametrize("role", ["", "trainer", "worker", "evaluator", "reference"])
def test_every_role_reads_its_settings(bucket, role):
    config = config_of(read_run(bucket), url=bucket.url, role=role)
    assert (config.name, config.rollout.group_size, config.train.groups_per_step) == ("kept", 4, 2)
    assert config.train.versions == 1_000_000
    assert config.task.options == {"min_word_len": 3, "max_word_len": 4}


def test_every_version_is_read(bucket):
    run, status = read_run(bucket), read_trainer(bucket)
    newest = newest_version(bucket)
    assert newest >= 3
    assert (status.phase, status.version) == ("stopped", newest)
    for version in range(newest + 1):
        digest = read_manifest(bucket, run, version).digest
        assert codec.digest_model(load_mirror(bucket, run, at=version).tensors).hex() == digest


def test_it_is_shown(bucket):
    found = Watch(bucket).poll()
    assert (found.phase, found.version, found.problems) == ("stopped", newest_version(bucket), [])
    assert {"trainer", "w0"} <= {line.name for line in found.processes}


def test_it_is_published_into(bucket):
    run = read_run(bucket)
    with continue_publisher(bucket) as publisher:
        tensors = {name: bits.copy() for name, bits in load_mirror(bucket, run).tensors.items()}
        first = min(tensors)
        tensors[first].flat[0] ^= 1
        shapes = {spec.name: spec.shape for spec in run.tensors}
        publisher.publish({name: bits.reshape(shapes[name]) for name, bits in tensors.items()})
    newest = newest_version(bucket)
    manifest = read_manifest(bucket, run, newest)
    assert manifest.build == build_name()
    held = load_mirror(bucket, run)
    assert held.version == newest
    assert (held.tensors[first] == tensors[first]).all()


@pytest.mark.drills
@pytest.mark.timeout(1800)
def test_it_is_continued(bucket, tmp_path):
    """A trainer and a worker of this build go on where those of the release ended."""
    before = newest_version(bucket)
    logs = [(tmp_path / name).open("w+") for name in ("trainer", "w0")]
    processes = [
        subprocess.Popen([sys.executable, "-m", "deltawire", *words], stdout=log, stderr=log)
        for log, words in zip(
            logs, (["trainer", bucket.url], ["worker", bucket.url, "--id", "w0"]), strict=True
        )
    ]
    try:
        deadline = time.monotonic() + PATIENCE_S
        while newest_version(bucket) < before + 3:
            assert all(one.poll() is None for one in processes), [
                Path(log.name).read_text() for log in logs
            ]
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.2)
    finally:
        for one in processes:
            one.terminate()
        codes = [one.wait(PATIENCE_S) for one in processes]
        for log in logs:
            log.close()
    assert codes == [0, 0]
    newest = newest_version(bucket)
    fates = audit_fates(bucket, max_staleness=2)
    assert fates.consumed == 2 * newest
    assert (fates.twice, fates.forgotten) == ([], [])
    assert read_manifest(bucket, read_run(bucket), newest).build == build_name()
