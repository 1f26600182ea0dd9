"""A real run whose reference process is killed by SIGKILL goes on with the same scores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_config

from deltawire.events import Life
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.store import Bucket, open_bucket
from deltawire.sync import newest_version
from deltawire.wire import keys

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = f"""
name = "held"
{tiny_config.MODEL}[task]
heldout = 4
{tiny_config.ROLLOUT.replace("workers = 2", "workers = 1")}[train]
versions = 100000
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
    """The run has no last version, and every condition that is awaited holds from then on."""
    (tmp_path / "run.toml").write_text(CONFIG)
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "deltawire", "run", "run.toml", "--out", "out", "--plain"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    tail, lives = EventTail(bucket), []

    def returned() -> bool:
        lives.extend(event for event in tail.read() if isinstance(event, Life))
        return any(one.process == "reference" and one.what == "restarted" for one in lives)

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 250
        while not condition():
            assert process.poll() is None, (tmp_path / "printed").read_text()[-6000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    try:
        until(lambda: len(bucket.list(keys.REFERENCES)) >= 3)
        heartbeat = read_heartbeat(bucket, "reference")
        assert heartbeat is not None
        before = scores(bucket)
        os.kill(heartbeat.pid, signal.SIGKILL)
        until(returned)
        scored, version = len(bucket.list(keys.REFERENCES)), newest_version(bucket) or 0
        until(lambda: len(bucket.list(keys.REFERENCES)) > scored)
        until(lambda: (newest_version(bucket) or 0) > version)
        process.send_signal(signal.SIGINT)
        assert process.wait(250) == 130, (tmp_path / "printed").read_text()[-6000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    after = scores(bucket)
    assert {key: after[key] for key in before} == before, "what is there is never scored again"
    died = [one for one in lives if one.process == "reference" and one.what == "died"]
    assert ["signal 9" in one.detail for one in died] == [True]
    status = read_trainer(bucket)
    assert status is not None
    assert (status.phase, status.version) == ("stopped", newest_version(bucket))
    assert len(after) >= 2 * status.version
    assert verify_training(bucket).exact
