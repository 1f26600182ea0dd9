"""Trainers over ranks, started as commands; `benchmarks.training.rank_runs` has the runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.training import rank_runs
from benchmarks.training.rank_runs import digests, environment, metadata_of
from deltawire.store import Bucket

VERSIONS = 6
__all__ = ["VERSIONS", "begin", "digests", "environment", "metadata_of", "start_trainer", "train"]


def begin(
    folder: Path, *, versions: int = VERSIONS, family: str = "qwen3", reference=None, **train
) -> Bucket:
    """A bucket with a run at version 0, and the groups of all its steps."""
    return rank_runs.begin(
        folder, versions=versions, family=family, train=train, reference=reference or {}
    )


def start_trainer(bucket: Bucket, *words: str, torchrun: int = 0) -> subprocess.Popen[str]:
    """``deltawire trainer`` on a run, which starts its ranks; or ``torchrun`` with as many."""
    command = [sys.executable]
    if torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    command += ["-m", "deltawire", "trainer", bucket.url, *words]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def train(bucket: Bucket, *words: str, torchrun: int = 0, code: int = 0) -> str:
    """Trains to the end; returns what the processes printed."""
    process = start_trainer(bucket, *words, torchrun=torchrun)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, output[-4000:]
    return output
