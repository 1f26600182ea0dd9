"""Worker and trainer are killed while a pilot's fill is in flight: nothing is consumed twice, the
ledger is exact, and the bound on staleness holds.

The worker is stopped first, so that what it was granted stays in flight until both are killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_config

from deltawire.rl.control.rollout_reader import read_group
from deltawire.rl.evaluate.audit import all_metadata, audit_consumption, audit_fates
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.store import Bucket, open_bucket
from deltawire.wire import keys

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(300)]

VERSIONS, STALENESS, PILOT, LARGEST = 6, 2, 2, 6
CONFIG = f"""
name = "killed"
{tiny_config.MODEL}[task]
environment = "dataset"
prompt = "{{question}}"
heldout = 1
reward = "own_rewards:mixed"
[task.data]
path = "rows.jsonl"
answer = "answer"
{tiny_config.ROLLOUT.replace("workers = 2", "workers = 1")}[rollout.allocation]
policy = "pilot"
pilot = {PILOT}
largest = {LARGEST}
skip_above = 1.0
defer_below = 0.0
[train]
versions = {VERSIONS}
groups_per_step = 2
max_staleness = {STALENESS}
checkpoint_every = 2
[evaluate]
every = 0
"""


def owed_fills(bucket: Bucket) -> set[int]:
    """The numbers of the fills that w0 was granted and that the trainer does not have."""
    status = known_trainer(bucket)
    draws = (status.draws or {}).get("w0", []) if status is not None else []
    return {
        number for one in draws for number, part in zip(one.numbers, one.parts, strict=True) if part
    }


def pid_of(bucket: Bucket, name: str) -> int:
    heartbeat = read_heartbeat(bucket, name)
    assert heartbeat is not None
    return heartbeat.pid


def kill_both_with_a_fill_in_flight(process: subprocess.Popen[bytes], bucket: Bucket) -> None:
    """Stops the worker once it has stored a pilot, waits until the trainer has granted the fill,
    and kills both. Every pilot of this configuration is filled, and a stopped worker stores none,
    so the fill stays granted."""
    wait_for(process, lambda: bool(bucket.list(keys.rollouts_of("w0"))))
    worker = pid_of(bucket, "w0")
    os.kill(worker, signal.SIGSTOP)
    wait_for(process, lambda: bool(owed_fills(bucket)))
    os.kill(pid_of(bucket, "trainer"), signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)


def wait_for(process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_is_consumed_twice(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(CONFIG)
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    support = str(Path(tiny_config.__file__).parent)
    environment = {
        **os.environ,
        "DELTAWIRE_TRUSTED_MODULES": "own_rewards",
        "PYTHONPATH": os.pathsep.join([support, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire", "run", "run.toml", "--out", "out", "--plain"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        kill_both_with_a_fill_in_flight(process, bucket)
        assert process.wait(250) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    fates = audit_fates(bucket, max_staleness=STALENESS)
    assert (fates.twice, fates.forgotten) == ([], [])
    audited = audit_consumption(bucket)
    assert (audited.versions, audited.repeated, audited.lost) == (VERSIONS, 0, 0)
    assert audited.staleness_max <= STALENESS
    assert fates.consumed == audited.consumed
    trained: list[int] = []
    for version, metadata in all_metadata(bucket):
        records = [one for one in metadata.prompts if one.verdict in ("train", "partial")]
        assert len(records) == len(metadata.parts) == 2
        assert sum(metadata.parts) == len(metadata.consumed)
        trained += [one.position for one in records]
        sizes = []
        for worker, sequence in metadata.consumed:
            found = read_group(bucket, worker, sequence)
            assert found is not None
            sizes.append(len(set(found[0].episodes)))
        assert sum(sizes) == sum(one.completions for one in records), f"version {version}"
        assert all(one.pilot <= one.completions <= LARGEST for one in records)
    assert len(set(trained)) == len(trained) == 2 * VERSIONS, "no prompt is trained on twice"
    assert verify_training(bucket).exact
    status = known_trainer(bucket)
    assert status is not None
    assert status.incidents == [], "no honest worker is blamed"
