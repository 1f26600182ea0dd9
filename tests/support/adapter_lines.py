"""Runs of several adapters over one base, small enough to train in a test."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
from granted_groups import UNCHECKED, made_up_group, put_group
from heartbeats import put_heartbeat

from deltawire.config import BuildConfig, RunConfig, parse_config
from deltawire.export.models import save_model
from deltawire.rl.trainer.bootstrap import start_lines
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.process import open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_manifest
from deltawire.train.build import build_model, byte_tokenizer

VERSIONS = 3
LINES = [
    {"name": "math", "rank": 4, "alpha": 8.0},
    {"name": "words", "rank": 2, "alpha": 2.0, "targets": ["q_proj", "down_proj"]},
]
PACKED = [one | {"targets": ["q_proj", "experts"], "packed": "int4-g32"} for one in LINES]
DENSE = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=64)
EXPERTS = msgspec.structs.replace(
    DENSE, family="qwen3_moe", feed_forward_size=32, experts=4, experts_per_token=2
)


def config_of(folder: Path, adapters: list[dict[str, Any]] = LINES, **train: Any) -> RunConfig:
    settings = {
        "versions": VERSIONS,
        "groups_per_step": 2,
        "max_staleness": 100,
        "checkpoint_every": 2,
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup_steps": 1},
        "adapters": adapters,
        **train,
    }
    raw = {
        "name": "lines",
        "model": {"path": str(folder / "model")},
        "train": settings,
        "trust": UNCHECKED,
        "evaluate": {"every": 0},
    }
    return parse_config(raw, source="test")


def start(
    folder: Path, config: RunConfig, sizes: BuildConfig = DENSE, *, number: int = 0
) -> Bucket:
    """A bucket with a run of several adapters at version 0, and the groups of all its steps;
    ``number`` is that of the first line's groups."""
    save_model(build_model(sizes, seed=0), byte_tokenizer(), folder / "model")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    start_lines(bucket, config, folder / "model")
    for line, one in enumerate(config.train.adapters, number):
        place = line_bucket(bucket, one.name)
        for sequence in range(2 * VERSIONS):
            put_group(place, sequence, made_up_group(100 * line + sequence))
        put_heartbeat(place, "w0", stored=2 * VERSIONS, at=time.time())
    return bucket


def digests(bucket: Bucket, line: str) -> list[str]:
    place = line_bucket(bucket, line)
    run, _ = open_run(place)
    return [one.digest for one in [read_manifest(place, run, 0), *read_history(place, run)]]
