"""A real run whose reference process is killed by SIGKILL goes on with the same scores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_config

from deltawire.events import Life
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.store import Bucket, open_bucket
from deltawire.wire import keys

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]

VERSIONS = 12
CONFIG = f"""
name = "held"
{tiny_config.MODEL}[task]
heldout = 4
{tiny_config.ROLLOUT.replace("workers = 2", "workers = 1")}[train]
versions = {VERSIONS}
groups_per_step = 2
checkpoint_every = 4
loss.kl = "k2"
[reference]
mode = "process"
[evaluate]
every = 0
"""


def scores(bucket: Bucket) -> dict[str, bytes | None]:
    return {key: bucket.get(key, limit=1 << 20) for key in bucket.list(keys.REFERENCES)}


def test_a_killed_reference_returns_and_no_score_changes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire", "run", "run.toml", "--out", "out", "--plain"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    before: dict[str, bytes | None] = {}
    try:
        deadline = time.monotonic() + 250
        while process.poll() is None and time.monotonic() < deadline:
            if not before and len(bucket.list(keys.REFERENCES)) >= 3:
                heartbeat = read_heartbeat(bucket, "reference")
                assert heartbeat is not None
                before = scores(bucket)
                os.kill(heartbeat.pid, signal.SIGKILL)
            time.sleep(0.02)
        assert process.poll() == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert before
    after = scores(bucket)
    assert {key: after[key] for key in before} == before, "what is there is never scored again"
    assert len(after) >= 2 * VERSIONS
    lives = [event for event in EventTail(bucket).read(everything=True) if isinstance(event, Life)]
    died = [one for one in lives if one.process == "reference" and one.what == "died"]
    assert ["signal 9" in one.detail for one in died] == [True]
    status = read_trainer(bucket)
    assert status is not None
    assert (status.phase, status.version) == ("finished", VERSIONS)
    assert verify_training(bucket).exact
