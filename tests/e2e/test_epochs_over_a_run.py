"""A real run draws each row of its data once an epoch, over all workers, and one of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny_config
from killing import run_and_kill_a_worker

from deltawire.config import load_config
from deltawire.envs import open_tasks
from deltawire.rl.control.draws import RUN_STREAM
from deltawire.rl.control.rollout_reader import read_group
from deltawire.runtime.fleet import read_trainer
from deltawire.store import Bucket, open_bucket
from deltawire.sync import find_run, read_manifest
from deltawire.wire.ledger import CommitMetadata

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(300)]

ROWS = 9
VERSIONS = 16
CONFIG = f"""
name = "epochs"
{tiny_config.MODEL}[task]
environment = "dataset"
prompt = "{{question}}"
heldout = 1
[task.data]
path = "rows.jsonl"
answer = "answer"
{tiny_config.ROLLOUT}[train]
versions = {VERSIONS}
groups_per_step = 2
checkpoint_every = 4
[evaluate]
every = 0
"""


def settled_tasks(bucket: Bucket) -> list[str]:
    """The tasks of all groups that a version consumed or dropped."""
    run, found = find_run(bucket), []
    assert run is not None
    for version in range(1, VERSIONS + 1):
        manifest = read_manifest(bucket, run, version)
        assert manifest is not None
        metadata = CommitMetadata.of(manifest.metadata, run=bucket.url, version=version)
        for worker, sequence in metadata.settled_groups():
            group = read_group(bucket, worker, sequence)
            assert group is not None
            found.append(group[0].task)
        assert metadata.position >= len(found)
    return found


def test_every_row_is_drawn_once_an_epoch_though_a_worker_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(ROWS + 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(CONFIG)
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire", "run", "run.toml", "--out", "out", "--plain"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        killed = run_and_kill_a_worker(process, bucket, ("w0", "w1"), within_s=250)
        assert process.poll() == 0
        assert killed
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    status = read_trainer(bucket)
    assert status is not None
    assert status.draws is not None
    held = {
        position for leases in status.draws.values() for one in leases for position in one.positions
    }
    monkeypatch.chdir(tmp_path)
    assert status.incidents == [], "no honest worker is blamed"
    tasks = open_tasks(load_config(tmp_path / "run.toml").task, seed=0)
    order = [tasks.draw(RUN_STREAM, position).identity for position in range(status.next_draw)]
    used = [
        order[position]
        for position in range(status.next_draw)
        if position not in held and position not in status.returned
    ]
    assert Counter(settled_tasks(bucket)) == Counter(used)
    for epoch in range(status.next_draw // ROWS):
        assert len(set(order[epoch * ROWS : (epoch + 1) * ROWS])) == ROWS
    assert len(used) >= 2 * VERSIONS
