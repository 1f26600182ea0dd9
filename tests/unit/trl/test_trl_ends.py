"""A training with the callback that ends in the middle loses no step that it published."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltawire.store import open_bucket
from deltawire.sync import newest_version, read_manifest, read_run
from deltawire.sync.maintain.fsck import check_run

pytest.importorskip("trl")

pytestmark = [pytest.mark.drills, pytest.mark.long]

PROGRAM = Path(__file__).parents[2] / "support" / "trainer_to_end.py"


def end(*command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, check=False
    )
    return done.returncode, done.stderr


def assert_last_step_is_committed(url, said):
    bucket = open_bucket(url)
    run = read_run(bucket)
    assert read_manifest(bucket, run, newest_version(bucket)).metadata == {"global_step": 2}, said
    assert check_run(bucket).faults == []
    assert "was not committed" not in said


@pytest.mark.parametrize(
    ("way", "statuses"),
    [
        ("exit", [3]),
        ("error", [1]),
        ("interrupted", [1, -signal.SIGINT]),  # Python forgets the signal if a library runs code.
        ("terminated", [-signal.SIGTERM]),
    ],
)
def test_a_training_of_trl(tmp_path, way, statuses):
    url = str(tmp_path / "run")
    found, said = end(str(PROGRAM), url, way)
    assert found in statuses, said
    assert_last_step_is_committed(url, said)


@pytest.mark.parametrize("way", ["exit", "error", "terminated"])
def test_two_ranks_of_torchrun(tmp_path, way):
    url = str(tmp_path / "run")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found, said = end(*launcher, str(PROGRAM), url, way)
    assert found != 0, said
    assert_last_step_is_committed(url, said)
