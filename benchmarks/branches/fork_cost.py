"""``fork_seconds`` and ``fork_kb``: forks of a run of a hundred versions of the real model's size.

The model has random weights and the sizes of SmolLM2-135M: 30 layers of 576, a vocabulary of 49,152
(146 million weights, because the built family has as many heads for keys as for queries). Each
version changes one percent of the weights at random places, and names eight groups. Two versions
have a stored state of the trainer, as with the default settings: 100, which is an anchor, and 80,
which is read from the anchor of version 50 on. Three forks of each are made by ``fork_run``; the
slowest, and the one that stores most, count. The details have both versions, what a fork would
store with an unpacked commit, and the seconds and megabytes of a copy into another bucket.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.training.keys import Measured, Options
from deltawire.config import BuildConfig, parse_config
from deltawire.export.lines import open_policy
from deltawire.export.models import save_model
from deltawire.launch.branches.forking import fork_run
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.resume import resume
from deltawire.store import Bucket, open_bucket
from deltawire.sync import load_mirror, read_manifest, read_run
from deltawire.sync.publish.sources import continue_publisher
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.checkpoint import save_checkpoint
from deltawire.train.checkpoint_commit import MAX_COMMIT_BYTES, Commit
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata

VERSIONS = 100
FORKS = 3
STATES = (80, 100)
"""Versions whose states are stored: the last two multiples of ``train.checkpoint_every``."""
GROUPS = 8
CHANGED = 0.01
SIZES = BuildConfig(
    hidden_size=576, layers=30, head_size=64, feed_forward_size=1536, vocabulary=49152, context=512
)


def build(folder: Path) -> Path:
    """Writes the model, and returns its directory."""
    save_model(build_model(SIZES, seed=0), byte_tokenizer(), folder / "model")
    return folder / "model"


def long_run(folder: Path, model: Path, seed: int) -> Bucket:
    """Publishes versions of a model, and stores a trainer's state at some of them."""
    raw = {"name": "long", "seed": seed, "model": {"path": str(model)}, "threads": 1}
    config = parse_config(raw, source="long")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    run = start_run(bucket, config, model)
    rng = np.random.default_rng(seed)
    mirror = load_mirror(bucket, run, at=0)
    shapes = {spec.name: spec.shape for spec in run.tensors}
    bits = {name: one.reshape(shapes[name]).copy() for name, one in mirror.tensors.items()}
    with continue_publisher(bucket, anchor_every=config.train.anchor_every) as publisher:
        for version in range(1, VERSIONS + 1):
            for one in bits.values():
                flat: Any = one.reshape(-1)
                flat[rng.integers(flat.size, size=int(flat.size * CHANGED) + 1)] ^= 1
            consumed = [("w0", version * GROUPS + place) for place in range(GROUPS)]
            metadata = CommitMetadata(
                step=version, consumed=consumed, hashes=[f"{one[1]:032x}" for one in consumed]
            )
            publisher.publish(bits, metadata=metadata.to_dict(), wait=True)
    policy = open_policy(bucket, config, model, adapter=config.train.adapter)
    state = resume(bucket, run, config, policy, newest=0)
    for version in STATES:
        manifest = read_manifest(bucket, run, version)
        assert manifest is not None
        save_checkpoint(
            bucket, state.masters.state(), state.ledger,
            version=version, digest=manifest.digest, run=run.id,
        )  # fmt: skip
    return bucket


def stored_bytes(bucket: Bucket) -> int:
    """Returns the bytes of a bucket's objects."""
    return sum(one.bytes for one in bucket.list_objects(""))


def fork_costs(bucket: Bucket, version: int, *, forks: int = FORKS) -> list[tuple[float, int]]:
    """Makes forks below the run; returns the seconds and bytes of each."""
    found = []
    for number in range(forks):
        start = time.perf_counter()
        made = fork_run(bucket, read_run(bucket), version, f"fork-{version}-{number}")
        seconds = time.perf_counter() - start
        assert made.state == "shared"
        found.append((seconds, stored_bytes(open_bucket(made.url))))
    return found


def unpacked_bytes(bucket: Bucket, version: int) -> int:
    """Returns by how much more a fork would store with an unpacked commit."""
    key = keys.checkpoint_commit(version)
    data = bucket.get(key, limit=MAX_COMMIT_BYTES)
    assert data is not None
    commit = Commit.decode(data, run=bucket.url, key=key)
    return len(commit.encode(packed=False)) - len(commit.encode(packed=True))


def measure(options: Options) -> Measured:
    """Publishes the run, and forks it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bucket = long_run(folder, build(folder), options.seed)
        costs = {version: fork_costs(bucket, version) for version in STATES}
        largest = {version: max(size for _, size in made) for version, made in costs.items()}
        start = time.perf_counter()
        fork_run(bucket, read_run(bucket), VERSIONS, "copy", to=str(folder / "elsewhere"))
        copied = time.perf_counter() - start
        details = {
            "versions": VERSIONS,
            "seconds": {
                version: [round(seconds, 3) for seconds, _ in made]
                for version, made in costs.items()
            },
            "kb": {version: size / 1e3 for version, size in largest.items()},
            "kb_with_unpacked_commit": (largest[VERSIONS] + unpacked_bytes(bucket, VERSIONS)) / 1e3,
            "copy_seconds": round(copied, 1),
            "copy_mb": stored_bytes(open_bucket(str(folder / "elsewhere"))) / 1e6,
        }
    values = {
        "fork_seconds": max(seconds for made in costs.values() for seconds, _ in made),
        "fork_kb": max(largest.values()) / 1e3,
    }
    return Measured(values, details)
