"""Runs of a trainer over ranks: a bucket with a run and groups enough, and processes to train it.

The processes are real: ``deltawire trainer`` starts its ranks, and a supervisor is not needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from granted_groups import UNCHECKED, put_group
from heartbeats import put_heartbeat

from deltawire.config import BuildConfig, parse_config
from deltawire.export.models import save_model
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_manifest, read_run
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.rollouts import Group, Trajectory

VERSIONS = 6


def group(number: int, tokens: int = 6) -> Group:
    rng = np.random.default_rng(number)
    trajectories = [
        Trajectory(
            rng.integers(0, 256, tokens, np.int32),
            np.full(tokens, -5.0, np.float32),
            np.zeros(tokens, np.int32),
            np.ones(tokens, np.uint8),
            float(place % 2),
            "stop",
        )
        for place in range(4)
    ]
    return Group("w0", "n", f"task {number}", 1.0, np.array([1, 2, 3], np.int32), trajectories)


def begin(folder: Path, *, versions: int = VERSIONS, family: str = "qwen3", **train) -> Bucket:
    """A bucket with a run at version 0, and the groups of all its steps."""
    sizes = BuildConfig(
        family=family, hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64,
        experts=4,
    )  # fmt: skip
    save_model(build_model(sizes, seed=0), byte_tokenizer(), folder / "model")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    config = {
        "name": "ranks",
        "trust": UNCHECKED,
        "model": {"path": str(folder / "model")},
        "rollout": {"context": 64, "max_tokens": 32},
        "train": {
            "versions": versions,
            "groups_per_step": 2,
            "max_staleness": 1000,
            "checkpoint_every": 2,
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"warmup_steps": 1},
            "max_tokens_per_batch": 64,
            **train,
        },
    }
    start_run(bucket, parse_config(config, source="test"), folder / "model")
    for number in range(2 * versions):
        put_group(bucket, number, group(number))
    put_heartbeat(bucket, "w0", stored=2 * versions, at=time.time())
    return bucket


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


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


def digests(bucket: Bucket) -> list[str]:
    run = read_run(bucket)
    found = [read_manifest(bucket, run, 0), *read_history(bucket, run)]
    return [manifest.digest for manifest in found]


def metadata(bucket: Bucket) -> list[CommitMetadata]:
    """What each version after 0 recorded of its step."""
    return [
        CommitMetadata.of(one.metadata, run="", version=one.version)
        for one in read_history(bucket, read_run(bucket))
    ]
