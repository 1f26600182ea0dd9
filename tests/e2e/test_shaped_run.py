"""A small local shape starts a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_config

from deltawire.cli.main import main
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import open_run
from deltawire.store import open_bucket

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(300)]

CONFIG = f"""
name = "shaped"
{tiny_config.MODEL}[task]
heldout = 4
{tiny_config.ROLLOUT}[train]
versions = 2
groups_per_step = 2
loss.kl = "k2"
optimizer.learning_rate = 1e-3
[evaluate]
every = 0
"""


def test_a_local_shape_starts_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text(CONFIG.replace("workers = 2", "workers = 1"))
    asked = ("--on", "1xcpu", "--context", "128", "--mode", "lora", "--lora-rank", "4")
    plan = ("--checkpointing", "selective", "--startable", "--out", "shape.json")
    monkeypatch.chdir(tmp_path)
    assert main(["shapes", "run.toml", *asked, *plan]) == 0
    assert main(["run", "run.toml", "--shape", "shape.json", "--out", "out", "--plain"]) == 0
    bucket = open_bucket(str(tmp_path / "out" / "bucket"))
    _, config = open_run(bucket)
    status = read_trainer(bucket)
    assert status is not None
    assert (status.phase, status.version) == ("finished", 2)
    assert config.shape["name"].startswith("shaped-lora-")
    assert (config.train.adapter.rank, config.train.compute) == (4, "bfloat16")
    assert config.train.activation_checkpointing == "selective"
    assert config.reference_mode == "adapter_off"
