"""A real run moves what its compute is spent on, and its events give the same moves again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_config

from deltawire.launch.budget import replay_budget
from deltawire.rl.control.rollout_reader import read_group
from deltawire.runtime.fleet import read_trainer
from deltawire.store import Bucket, open_bucket
from deltawire.sync import find_run, newest_version, read_manifest
from deltawire.wire.ledger import CommitMetadata

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(300)]

CONFIG = f"""
name = "moved"
{tiny_config.MODEL}[task]
environment = "serial_steps"
dataset = "parity"
prompt = "{{question}}"
heldout = 8
options = {{ min_length = 2, max_length = 6, start = "(", end = ")" }}
{tiny_config.ROLLOUT}
thinking = {{ end = ")", budgets = [2], answer_tokens = 2 }}
[train]
versions = VERSIONS
groups_per_step = 2
checkpoint_every = 1000
[evaluate]
every = 2
samples = 1
[budget]
controller = "auto"
completions = [4, 6]
problems = 4
"""


class Seen:
    """Sizes of consumed groups, read version by version as they are committed."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._next = bucket, 1
        self.sizes: set[int] = set()

    def read(self) -> set[int]:
        run = find_run(self._bucket)
        newest = newest_version(self._bucket) if run is not None else None
        while run is not None and newest is not None and self._next <= newest:
            manifest = read_manifest(self._bucket, run, self._next)
            assert manifest is not None
            url = self._bucket.url
            metadata = CommitMetadata.of(manifest.metadata, run=url, version=self._next)
            for worker, sequence in metadata.consumed:
                found = read_group(self._bucket, worker, sequence)
                assert found is not None
                self.sizes.add(len(found[0].trajectories))
            self._next += 1
        return self.sizes


def begin(folder: Path, versions: int) -> subprocess.Popen[bytes]:
    (folder / "run.toml").write_text(CONFIG.replace("VERSIONS", str(versions)))
    command = [sys.executable, "-m", "deltawire", "run", "run.toml", "--out", "out"]
    with (folder / "printed").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def test_a_live_run_moves_its_completions_and_the_moves_can_be_replayed(tmp_path: Path) -> None:
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    seen, deadline = Seen(bucket), time.monotonic() + 240
    run = begin(tmp_path, 1_000_000)
    try:
        # The second evaluation tries completions that were not tried before. Groups of the new size
        # are then stored, consumed by a version, and stay.
        while not seen.read() >= {4, 6}:
            assert run.poll() is None, (tmp_path / "printed").read_text()[-6000:]
            assert time.monotonic() < deadline, "no group of the other size was trained on"
            time.sleep(0.2)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(120)
    found = replay_budget(bucket.url)
    assert found.equal, (found.differ, found.extra)
    assert found.moves[0].after.completions == 6
    assert found.moves[0].reason == "6 completions were not tried yet"
    status = read_trainer(bucket)
    assert status is not None
    assert status.budget in {one.after for one in found.decisions}
