"""Power cuts: no acknowledged commit is lost, and what is left can be read and continued."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from power_cut import WriteLog, after_power_cut

from deltawire.store import open_bucket
from deltawire.sync import find_run, newest_version
from deltawire.testing.tiny import audit, start_publisher, weights

pytestmark = pytest.mark.drills

LAST = 7


def live(folder, log, *, durable):
    """Publish some versions; each acknowledgment is marked in the log."""
    bucket = open_bucket(str(folder), create=True, durable=durable)
    publisher = start_publisher(
        bucket, anchor_every=3, compaction_strides=(2,), threads=1,
        on_commit=lambda stats: log.mark(stats.version),
    )  # fmt: skip
    for version in range(LAST + 1):
        publisher.publish(weights(version))
        publisher.flush()
    publisher.close()


def check(folder, acknowledged):
    """Everything acknowledged is there, bit for bit, and a new publisher goes on from it."""
    bucket = open_bucket(str(folder), durable=False)
    newest = newest_version(bucket)
    assert acknowledged <= (-1 if newest is None else newest)
    if find_run(bucket) is not None:
        assert audit(bucket, weights) >= acknowledged
    publisher = start_publisher(bucket, anchor_every=3)
    for version in range(publisher.version + 1, publisher.version + 3):
        publisher.publish(weights(version))
    publisher.close()
    assert audit(bucket, weights) == publisher.version


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    logs = {}

    def record(durable):
        if durable not in logs:
            root = tmp_path_factory.mktemp("disk") / "root"
            root.mkdir()
            log = logs[durable] = WriteLog(root)
            with pytest.MonkeyPatch.context() as patch, log.recording(patch):
                live(root / "run", log, durable=durable)
        return logs[durable]

    return record


def cut(log, moment, into, seed):
    events = log.events[:moment]
    acknowledged = max((e[1] for e in events if e[0] == "mark"), default=-1)
    after_power_cut(events, log.root, into, seed)
    return acknowledged


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.long if seed % 5 else ()) for seed in range(50)],
)
def test_no_acknowledged_commit_is_lost(recorded, tmp_path, seed):
    log = recorded(True)
    moment = random.Random(seed).randrange(len(log.events) + 1)
    acknowledged = cut(log, moment, tmp_path / "disk", seed)
    if acknowledged < 0 and not (tmp_path / "disk" / "run").is_dir():
        return
    check(tmp_path / "disk" / "run", acknowledged)


def test_the_drill_notices_writes_that_are_not_flushed(recorded, tmp_path):
    """Without flushing, acknowledged commits are lost: this disk does lose them."""
    log = recorded(False)
    lost = 0
    for seed in range(10):
        acknowledged = cut(log, len(log.events), tmp_path / str(seed), seed)
        assert acknowledged == LAST
        try:
            check(tmp_path / str(seed) / "run", acknowledged)
        except Exception:
            lost += 1
    assert lost == 10


WRITER = """
import sys
from deltawire.store import open_bucket
from deltawire.testing.tiny import start_publisher, weights
bucket = open_bucket(sys.argv[1], create=True, durable=True)
publisher = start_publisher(bucket, anchor_every=3, threads=1,
                            on_commit=lambda stats: print(stats.version, flush=True))
for version in range(publisher.version + 1, 10**6):
    publisher.publish(weights(version))
    publisher.flush()
"""


def mounted(image, folder, *options):
    done = subprocess.run(
        ["mount", "-o", ",".join(["loop", *options]), image, folder],
        check=False,
        capture_output=True,
    )
    return done.returncode == 0


@pytest.fixture
def disk(tmp_path):
    """Mounts an ext4 file system in an image file; skips where that is not allowed."""
    image, folder = tmp_path / "disk.img", tmp_path / "mounted"
    folder.mkdir()
    if shutil.which("mkfs.ext4") is None or os.geteuid() != 0:
        pytest.skip("making and mounting a file system needs root and mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    if not mounted(image, folder):
        pytest.skip("file systems cannot be mounted here")
    yield image, folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_no_acknowledged_commit_is_lost_by_a_file_system(disk, tmp_path, drill_seed):
    """A copy of the device while a publisher writes to it is what a power cut leaves."""
    image, folder = disk
    random_ = random.Random(drill_seed)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    said = tmp_path / "acknowledged"
    with (
        said.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-c", WRITER, folder / "run"], stdout=output, env=environment
        ) as writer,
    ):
        while not said.read_text():
            assert writer.poll() is None
            time.sleep(0.01)
        time.sleep(random_.random())
        # Stopped first: a copy takes a while, and a power cut leaves the disk of one moment.
        writer.send_signal(signal.SIGSTOP)
        acknowledged = max(map(int, said.read_text().splitlines()))
        copy = tmp_path / "copy.img"
        subprocess.run(["cp", "--sparse=always", image, copy], check=True)
        writer.kill()
    after = tmp_path / "after"
    after.mkdir()
    assert mounted(copy, after)
    try:
        check(after / "run", acknowledged)
    finally:
        subprocess.run(["umount", "-l", after], check=True)
