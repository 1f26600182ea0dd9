"""Starts and trains runs of a tiny mixture of experts whose experts are packed in 4 bits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from granted_groups import start_with_groups

from deltawire.config import BuildConfig
from deltawire.export.adapter import open_model
from deltawire.export.models import fetch_model_files
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket
from deltawire.sync import read_history, read_manifest

VERSIONS = 3
ADAPTER = {
    "kind": "lora",
    "rank": 4,
    "alpha": 8.0,
    "targets": ["q_proj", "experts"],
    "packed": "int4-g32",
}
TRAIN = {
    "versions": VERSIONS,
    "groups_per_step": 1,
    "max_staleness": 100,
    "checkpoint_every": 2,
    "optimizer": {"learning_rate": 1e-2},
    "schedule": {"warmup_steps": 1},
}


def start(folder: Path, **adapter: object) -> Bucket:
    sizes = BuildConfig(
        family="qwen3_moe",
        hidden_size=32,
        layers=2,
        head_size=16,
        feed_forward_size=32,
        experts=4,
        experts_per_token=2,
        context=64,
    )
    folder.mkdir(exist_ok=True)
    settings = TRAIN | {"adapter": ADAPTER | adapter}
    return start_with_groups(folder, groups=VERSIONS, train=settings, sizes=sizes)


def train(bucket: Bucket, *, to: int = VERSIONS, die: bool = False) -> list[str]:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    shorter = msgspec.structs.replace(config.train, versions=to)
    config = msgspec.structs.replace(config, train=shorter)
    with fetch_model_files(bucket, run) as folder:
        model = open_model(Path(folder), config.train.adapter)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    trainer = Trainer(process, run, config, model)
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    trainer.loop()
    return [one.digest for one in [read_manifest(bucket, run, 0), *read_history(bucket, run)]]
