"""Whole runs whose trainer divides layers or experts over ranks: ``deltawire run`` starts the
ranks and a worker, which ends with the trainer's bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_config

from deltawire.cli.main import main
from deltawire.runtime.fleet import known_trainer, read_trainer
from deltawire.store import Bucket, open_bucket
from deltawire.sync import load_mirror, read_history, read_run

pytestmark = pytest.mark.timeout(300)

CONFIG = f"""
name = "parallel"
{tiny_config.MODEL}FAMILY
[task]
heldout = 4
{tiny_config.ROLLOUT.replace("workers = 2", "workers = 1")}[train]
versions = VERSIONS
groups_per_step = 2
checkpoint_every = 2
optimizer.learning_rate = 1e-3
AXES
[evaluate]
every = 0
"""
EXPERTS = 'family = "qwen3_moe"\nexperts = 4\nexperts_per_token = 2\n'
WAIT_S = 200.0


def write(folder: Path, axes: str, *, family: str = "", versions: int = 3) -> None:
    text = CONFIG.replace("VERSIONS", str(versions)).replace("AXES", axes)
    (folder / "run.toml").write_text(text.replace("FAMILY", family))


def assert_whole(folder: Path, versions: int, *, workers: int = 1) -> Bucket:
    """The run ended, and at least so many workers serve the bits of its last version."""
    bucket = open_bucket(str(folder / "out" / "bucket"))
    status = read_trainer(bucket)
    assert (status.phase, status.version) == ("finished", versions)
    report = json.loads((folder / "out" / "report.json").read_text())
    assert len(report["workers"]) >= workers
    assert all(one["bit_identical"] for one in report["workers"])
    run = read_run(bucket)
    last = list(read_history(bucket, run))[-1]
    assert load_mirror(bucket, run).digest.hex() == last.digest == status.digest
    return bucket


@pytest.mark.drills
def test_layers_divided_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "ranks = 2\ntensor_parallel = 2", versions=2)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "run.toml", "--out", "out", "--plain"]) == 0
    assert_whole(tmp_path, 2)


def ranks_of(folder: Path) -> list[int]:
    """The processes of ranks above 0, by the bucket in their command line and their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        follows = any(one.startswith(b"RANK=") and one != b"RANK=0" for one in variables)
        if str(folder).encode() in words and b"\0trainer\0" in words and follows:
            found.append(int(entry.name))
    return found


def begin(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deltawire", "run", "run.toml", "--out", str(folder / "out"),
         "--plain"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def version_of(folder: Path) -> int:
    place = folder / "out" / "bucket"
    status = known_trainer(open_bucket(str(place))) if place.exists() else None
    return status.version if status else -1


def run_with_a_kill(folder: Path, *, after: int) -> None:
    """Run to the end, and kill a rank once a version is committed."""
    process = begin(folder)
    try:
        deadline = time.monotonic() + WAIT_S
        while version_of(folder) < after or not ranks_of(folder):
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(ranks_of(folder)[0], signal.SIGKILL)
        output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, output[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=60)


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.timeout(600)  # Two runs, with four processes each to start.
@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("", "ranks = 2\ntensor_parallel = 2", "ranks = 2"),
        (EXPERTS, "ranks = 2\nexpert_parallel = 2", "ranks = 2\ntensor_parallel = 2"),
    ],
)
def test_a_killed_rank_and_then_another_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, before: str, after: str
) -> None:
    write(tmp_path, before, family=family, versions=4)
    run_with_a_kill(tmp_path, after=1)
    bucket = assert_whole(tmp_path, 4)
    digests = [one.digest for one in read_history(bucket, read_run(bucket))]
    assert main(["fsck", bucket.url]) == 0
    write(tmp_path, after, family=family, versions=6)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "run.toml", "--out", "out", "--plain"]) == 0
    # The groups may have been stored before: then it ends before a worker has joined it.
    assert_whole(tmp_path, 6, workers=0)
    again = [one.digest for one in read_history(bucket, read_run(bucket))]
    assert again[:4] == digests, "the first mesh's versions stay"
    assert len(again) == 6
