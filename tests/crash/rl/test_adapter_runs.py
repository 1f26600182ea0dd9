"""Runs that train an adapter: what is sent, pulled and merged, and resumed to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from granted_groups import start_with_groups

from deltawire.cli.main import main
from deltawire.config import parse_config
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, open_model
from deltawire.export.models import fetch_model_files
from deltawire.export.source import open_source
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket
from deltawire.sync import load_mirror, read_history, read_manifest

VERSIONS = 4


@pytest.fixture
def started(tmp_path) -> Bucket:
    return start(tmp_path)


def start(folder: Path, **train: Any) -> Bucket:
    settings = {
        "versions": VERSIONS,
        "groups_per_step": 2,
        "max_staleness": 100,
        "checkpoint_every": 2,
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup_steps": 1},
        "adapter": {"kind": "lora", "rank": 4, "alpha": 8.0},
        **train,
    }
    return start_with_groups(folder, groups=2 * VERSIONS, train=settings, layers=2)


def train(bucket: Bucket, *, to: int = VERSIONS, die: bool = False) -> list[str]:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    config = msgspec.structs.replace(
        config, train=msgspec.structs.replace(config.train, versions=to)
    )
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        model = open_model(Path(folder), config.train.adapter)
    trainer = Trainer(process, run, config, model)
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    trainer.loop()
    found = [read_manifest(bucket, run, 0), *read_history(bucket, run)]
    return [manifest.digest for manifest in found]


def test_steps_change_the_adapter_and_nothing_else(started):
    digests = train(started)
    assert len(set(digests)) == VERSIONS + 1
    run, _ = open_run(started)
    first, last = load_mirror(started, run, at=0), load_mirror(started, run)
    moved = {
        name for name, bits in last.tensors.items() if not np.array_equal(bits, first.tensors[name])
    }
    assert moved == {spec.name for spec in run.tensors if spec.name.startswith(PREFIX)}
    assert verify_training(started).exact
    assert main(["fsck", started.url]) == 0


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_after_crashes_the_same_bits(tmp_path, offload):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = train(start(tmp_path / "a"))
    bucket = start(tmp_path / "b", offload=offload)
    for version in (1, 3):
        train(bucket, to=version, die=True)
    assert train(bucket) == whole


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers in an old way.
def test_a_pulled_directory_is_one_that_peft_loads(started, tmp_path, capsys):
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    train(started)
    run, config = open_run(started)
    pulled, merged = tmp_path / "pulled", tmp_path / "merged"
    assert main(["pull", started.url, str(pulled), "--merged", str(merged), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])["merged"]
    assert report["layers"] == 14
    assert 0 < report["kept"] <= 1.5

    with fetch_model_files(started, run) as folder:
        ours = open_model(Path(folder), config.train.adapter)
    open_source("bf16", ours).restore(load_mirror(started, run))
    ids = torch.arange(20)[None]
    wanted = ours.eval()(input_ids=ids).logits

    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, local_files_only=True
    )
    loaded = peft.PeftModel.from_pretrained(base, str(pulled))
    assert torch.equal(loaded.eval()(input_ids=ids).logits, wanted)
    assert not torch.allclose(loaded.unload()(input_ids=ids).logits, wanted, atol=1e-4)

    settings = AutoConfig.from_pretrained(merged)
    whole = AutoModelForCausalLM.from_pretrained(merged, config=settings, dtype=torch.float32)
    gap = (whole.eval()(input_ids=ids).logits - wanted).abs().max()
    assert float(gap.detach()) < 0.05, "rounded to bf16 once more, and no more than that"
    assert main(["pull", started.url, str(pulled), "--merged", str(merged)]) == 0


def test_a_merge_of_a_whole_model_is_refused(tmp_path, capsys):
    bucket = start(tmp_path, adapter={"kind": "none"})
    assert main(["pull", bucket.url, str(tmp_path / "p"), "--merged", str(tmp_path / "m")]) == 2
    assert "no adapter to merge" in capsys.readouterr().err


def test_vllm_and_dropout_are_refused_by_name():
    raw = {"name": "x", "train": {"adapter": {"kind": "lora"}}, "rollout": {"engine": "vllm"}}
    with pytest.raises(InputError, match=r"vllm does not load train\.adapter"):
        parse_config(raw, source="s")
    raw = {"name": "x", "train": {"adapter": {"kind": "lora", "dropout": 0.1}}}
    with pytest.raises(InputError, match=r"adapter\.dropout has no effect"):
        parse_config(raw, source="s")
