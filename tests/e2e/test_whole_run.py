"""Whole runs as a user has them: real processes, a real folder, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path

import msgspec
import pytest
import tiny_config

from deltawire.rl.control.rollout_buffer import read_consumed
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.store import Bucket, open_bucket
from deltawire.sync import load_mirror, newest_version, read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata

pytestmark = pytest.mark.timeout(300)

CONFIG = f"""
name = "tiny"
{tiny_config.MODEL}[task]
heldout = 10
options = {{ min_word_len = 3, max_word_len = 4 }}
[warm_start]
max_steps = 4
check_every = 4
{tiny_config.ROLLOUT}[train]
versions = VERSIONS
groups_per_step = 4
max_staleness = 2
checkpoint_every = CHECKPOINT
anchor_every = 5
[evaluate]
every = 1000
samples = 1
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``deltawire`` with arguments; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "deltawire", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        if process.stdout is not None:
            process.stdout.close()


def write_config(
    folder: Path, versions: int, *, checkpoint_every: int = 4, text: str = CONFIG
) -> str:
    path = folder / "tiny.toml"
    text = text.replace("VERSIONS", str(versions))
    path.write_text(text.replace("CHECKPOINT", str(checkpoint_every)))
    return str(path)


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[str], limit_s: float
) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def committed(bucket: Bucket) -> int:
    return -1 if (version := newest_version(bucket)) is None else version


def all_metadata(bucket: Bucket) -> list[CommitMetadata]:
    run = read_run(bucket)
    assert run is not None
    found = []
    for version in range(1, committed(bucket) + 1):
        manifest = read_manifest(bucket, run, version)
        assert manifest is not None
        found.append(msgspec.convert(manifest.metadata["deltawire.step"], CommitMetadata))
    return found


def assert_each_group_once(bucket: Bucket, *, groups_per_step: int) -> None:
    """Every step consumed its groups, no group twice, and every one of them is still there."""
    counts: Counter[tuple[str, int]] = Counter()
    for metadata in all_metadata(bucket):
        assert len(metadata.consumed) == groups_per_step
        counts.update(metadata.consumed)
        counts.update(metadata.dropped_groups())
    assert set(counts.values()) == {1}
    for metadata in all_metadata(bucket):
        assert len(read_consumed(bucket, metadata)) == groups_per_step


def _serves(bucket: Bucket, name: str) -> bool:
    heartbeat = read_heartbeat(bucket, name)
    return heartbeat is not None and heartbeat.worker is not None


def test_a_run_with_a_killed_and_a_joined_worker(tmp_path: Path, start: Start) -> None:
    """One worker of the run, and one started by hand."""
    out = tmp_path / "out"
    text = CONFIG.replace("workers = 2", "workers = 1")
    bucket = open_bucket(str(out / "bucket"), create=True)
    run = start("run", write_config(tmp_path, 40, text=text), "--out", str(out), "--plain")
    joined = start("worker", bucket.url, "--id", "by-hand")  # waits for the run to appear
    wait_until(lambda: committed(bucket) >= 3, run, 120)
    for worker in ("by-hand", "w0"):
        wait_until(lambda name=worker: _serves(bucket, name), run, 60)
    victim = read_heartbeat(bucket, "w0")
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert joined.wait(60) == 0
    report = json.loads((out / "report.json").read_text())
    assert {w["id"]: w["bit_identical"] for w in report["workers"]} == {
        "w0": True,
        "by-hand": True,
    }
    assert {w["version"] for w in report["workers"]} == {40}
    assert report["versions"] == 40
    assert report["restarts"] >= 1
    assert report["staleness"]["max"] <= report["staleness"]["bound"] == 2
    assert report["bytes"]["delta_mean"] < report["bytes"]["full"]
    assert report["heldout"]["first"] is not None
    assert report["heldout"]["last"] is not None
    assert "<svg" in (out / "report.html").read_text()
    assert_each_group_once(bucket, groups_per_step=4)
    again = start("run", write_config(tmp_path, 40, text=text), "--out", str(out), "--plain")
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0, output
    assert committed(bucket) == 40


def test_interrupted_twice_and_a_trainer_killed(tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    bucket = open_bucket(str(out / "bucket"), create=True)
    # Only stopping makes checkpoints, so a trainer killed later always has steps to do over.
    alone = {"workers = 2": "workers = 1", "every = 1000": "every = 0"}
    text = reduce(lambda text, pair: text.replace(*pair), alone.items(), CONFIG)
    config = write_config(tmp_path, 60, checkpoint_every=1000, text=text)
    command = ("run", config, "--out", str(out), "--plain")
    first = start(*command)
    wait_until(lambda: committed(bucket) >= 3, first, 120)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=90)
    assert first.returncode == 130, output
    assert "the same command continues it" in output
    stopped_at = committed(bucket)
    assert stopped_at < 50
    status = read_trainer(bucket)
    assert status is not None
    assert (status.phase, status.version) == ("stopped", stopped_at)
    second = start(*command)
    wait_until(lambda: committed(bucket) >= stopped_at + 6, second, 120)
    log = (out / "logs" / "trainer.log").read_text()
    assert "error" not in log
    os.kill(_trainer_pid(bucket), signal.SIGKILL)
    output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output
    assert_each_group_once(bucket, groups_per_step=4)
    report = json.loads((out / "report.json").read_text())
    assert report["versions"] == 60
    assert all(w["bit_identical"] for w in report["workers"])
    details = [event.get("detail", "") for event in _events(bucket)]
    recomputed = [detail for detail in details if "recomputed" in detail]
    assert recomputed, "the trainer was killed after its checkpoint and must have recomputed steps"
    assert all("to the same bits" in detail for detail in recomputed)
    run = read_run(bucket)
    assert run is not None
    final = load_mirror(bucket, run)
    assert final is not None
    assert final.version == 60


BEYOND_ROUNDING = 1e-4
"""Between the gaps of this model's log-probabilities in float32 (5e-7) and in bf16 (1e-3)."""


@pytest.mark.drills
def test_stopped_by_the_parity_gate_and_continued(tmp_path: Path, start: Start) -> None:
    """The worker really samples in bf16, for a trainer that computes in float32."""
    out = tmp_path / "out"
    bucket = open_bucket(str(out / "bucket"), create=True)
    other = {
        "workers = 2": "workers = 1",
        "slots = 16": 'slots = 16\nprecision = "bfloat16"',
        "max_staleness = 2": "max_staleness = 0",
    }
    text = reduce(lambda text, pair: text.replace(*pair), other.items(), CONFIG)

    def run(limit: float) -> tuple[int, str]:
        limited = f"{text}[parity.stop]\nlargest_gap = {limit}\n"
        config = write_config(tmp_path, 3, text=limited)
        process = start("run", config, "--out", str(out), "--plain")
        output, _ = process.communicate(timeout=200)
        return process.returncode, output

    code, output = run(BEYOND_ROUNDING)
    assert code == 7, output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.search(r"sampler and trainer disagree: largest_gap \S+ against 0\.0001", error)
    assert "version 1" in error
    assert "raise the limit in [parity.stop]" in error
    status = read_trainer(bucket)
    assert status is not None
    assert (status.phase, status.version, committed(bucket)) == ("stopped", 0, 0)
    stopped = [e for e in _events(bucket) if e["event"] == "parity" and e.get("stopped")]
    assert len(stopped) == 1, "a restart would meet the same batch, so there is none"
    waiting = set(bucket.list(keys.ROLLOUTS))
    code, output = run(10.0)
    assert code == 0, output
    assert committed(bucket) == 3
    assert_each_group_once(bucket, groups_per_step=4)
    first = {
        keys.rollout(worker, sequence) for worker, sequence in all_metadata(bucket)[0].consumed
    }
    assert first <= waiting, "it goes on with the batch that it was stopped at"
    report = json.loads((out / "report.json").read_text())
    assert report["parity"]["stopped"] == []  # Of the batch that was trained on in the end.
    assert report["parity"]["largest_gap"] > BEYOND_ROUNDING
    assert all(w["bit_identical"] for w in report["workers"])


def _events(bucket: Bucket) -> list[dict[str, object]]:
    found = []
    for key in bucket.list(keys.EVENTS):
        data = bucket.get(key, limit=1 << 26) or b""
        found += [json.loads(line) for line in data.splitlines()]
    return found


def _trainer_pid(bucket: Bucket) -> int:
    lives = [e for e in _events(bucket) if e["event"] == "life" and e["process"] == "trainer"]
    started = [e for e in lives if e["what"] == "started" and not e.get("detail")]
    return int(str(max(started, key=lambda e: float(str(e["at"])))["pid"]))
