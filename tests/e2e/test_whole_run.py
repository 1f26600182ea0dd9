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
from deltawire.sync import find_run, load_mirror, newest_version, read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata

pytestmark = pytest.mark.timeout(900)

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


class Command:
    """``deltawire`` with arguments as a process. It prints to a file: a pipe that nobody reads
    would stop it once it is full."""

    def __init__(self, folder: Path, number: int, arguments: tuple[str, ...]) -> None:
        self._log = folder / f"printed-{number}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deltawire", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )

    def printed(self) -> str:
        return self._log.read_text()

    def ended(self, code: int, *, within_s: float = 250) -> str:
        """Waits for the end, which must have this exit code; returns what was printed."""
        found = self.process.wait(within_s)
        assert found == code, self.printed()[-6000:]
        return self.printed()


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``deltawire`` with arguments; whatever still runs at the end is killed."""
    started: list[Command] = []

    def begin(*arguments: str) -> Command:
        started.append(Command(tmp_path, len(started), arguments))
        return started[-1]

    yield begin
    for process in (one.process for one in started):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def write_config(
    folder: Path, versions: int, *, checkpoint_every: int = 4, text: str = CONFIG
) -> str:
    path = folder / "tiny.toml"
    text = text.replace("VERSIONS", str(versions))
    path.write_text(text.replace("CHECKPOINT", str(checkpoint_every)))
    return str(path)


def wait_until(condition: Callable[[], bool], run: Command) -> None:
    deadline = time.monotonic() + 250
    while not condition():
        assert run.process.poll() is None, run.printed()[-6000:]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def committed(bucket: Bucket) -> int:
    return -1 if (version := newest_version(bucket)) is None else version


def all_metadata(bucket: Bucket) -> list[CommitMetadata]:
    run = read_run(bucket)
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


def _kill(bucket: Bucket, name: str) -> None:
    heartbeat = read_heartbeat(bucket, name)
    assert heartbeat is not None, "a process writes a heartbeat before any other object"
    os.kill(heartbeat.pid, signal.SIGKILL)


def _stored(bucket: Bucket, worker: str) -> int:
    return len(bucket.list(keys.rollouts_of(worker)))


def _returned(bucket: Bucket, name: str) -> bool:
    lives = [e["what"] for e in _events(bucket) if e["event"] == "life" and e["process"] == name]
    return "restarted" in lives


def _recomputed(bucket: Bucket) -> list[str]:
    details = [str(event.get("detail", "")) for event in _events(bucket)]
    return [detail for detail in details if "recomputed" in detail]


@pytest.mark.drills
def test_a_worker_and_the_trainer_killed_then_interrupted_and_continued(
    tmp_path: Path, start: Start
) -> None:
    """One worker of the run, and one started by hand.

    The first session has versions without end, so that nothing can happen too late for it, and
    every condition that is awaited holds from then on.
    """
    out = tmp_path / "out"
    bucket = open_bucket(str(out / "bucket"), create=True)
    text = CONFIG.replace("workers = 2", "workers = 1")
    # Only stopping makes checkpoints, so the trainer that is killed has steps to do over.
    config = write_config(tmp_path, 100_000, checkpoint_every=100_000, text=text)
    command = ("run", config, "--out", str(out), "--plain")
    run = start(*command)
    joined = start("worker", bucket.url, "--id", "by-hand")  # waits for the run to appear
    for worker in ("by-hand", "w0"):
        wait_until(lambda name=worker: _stored(bucket, name) > 0, run)
    _kill(bucket, "w0")
    wait_until(lambda: _returned(bucket, "w0"), run)
    stored = _stored(bucket, "w0")
    wait_until(lambda: _stored(bucket, "w0") > stored, run)
    wait_until(lambda: committed(bucket) >= 3, run)
    assert "error" not in (out / "logs" / "trainer.log").read_text()
    _kill(bucket, "trainer")
    wait_until(lambda: bool(_recomputed(bucket)), run)
    before = committed(bucket)
    wait_until(lambda: committed(bucket) > before, run)
    run.process.send_signal(signal.SIGINT)
    assert "the same command continues it" in run.ended(130)
    stopped_at = committed(bucket)
    status = read_trainer(bucket)
    assert status is not None
    assert (status.phase, status.version) == ("stopped", stopped_at)
    joined.process.send_signal(signal.SIGTERM)
    joined.ended(0)
    _check_bits(bucket, "by-hand")
    # At most three of these steps can be made from what is stored: the last one needs w0.
    last = stopped_at + 4
    write_config(tmp_path, last, checkpoint_every=100_000, text=text)
    start(*command).ended(0)
    assert all("to the same bits" in detail for detail in _recomputed(bucket))
    _check_report(out, bucket, last)
    start(*command).ended(0)
    assert committed(bucket) == last


def _check_bits(bucket: Bucket, worker: str) -> None:
    """A worker that was stopped served the bits of a version until its end."""
    heartbeat, run = read_heartbeat(bucket, worker), find_run(bucket)
    assert run is not None
    assert heartbeat is not None
    assert heartbeat.ended
    assert heartbeat.worker is not None
    manifest = read_manifest(bucket, run, heartbeat.worker.version)
    assert manifest is not None
    assert heartbeat.worker.digest == manifest.digest


def _check_report(out: Path, bucket: Bucket, last: int) -> None:
    report = json.loads((out / "report.json").read_text())
    found = {one["id"]: (one["version"], one["bit_identical"]) for one in report["workers"]}
    assert found == {"w0": (last, True)}
    assert report["versions"] == last
    assert report["restarts"] >= 2
    assert report["staleness"]["max"] <= report["staleness"]["bound"] == 2
    assert report["bytes"]["delta_mean"] < report["bytes"]["full"]
    assert report["heldout"]["first"] is not None
    assert report["heldout"]["last"] is not None
    assert "<svg" in (out / "report.html").read_text()
    assert_each_group_once(bucket, groups_per_step=4)
    run = read_run(bucket)
    final = load_mirror(bucket, run)
    assert final.version == last


BEYOND_ROUNDING = 1e-4
"""Between the gaps of this model's log-probabilities in float32 (5e-7) and in bf16 (1e-3)."""


@pytest.mark.drills
@pytest.mark.long
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

    def run(limit: float, *, code: int) -> str:
        limited = f"{text}[parity.stop]\nlargest_gap = {limit}\n"
        config = write_config(tmp_path, 3, text=limited)
        return start("run", config, "--out", str(out), "--plain").ended(code)

    output = run(BEYOND_ROUNDING, code=7)
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
    run(10.0, code=0)
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
