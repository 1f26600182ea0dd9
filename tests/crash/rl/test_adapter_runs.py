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
from transformers import AutoConfig, AutoModelForCausalLM

from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, open_model
from deltawire.export.models import fetch_model_files, save_model
from deltawire.export.source import open_source
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import find_run, load_mirror, read_history, read_manifest
from deltawire.train.build import build_model, byte_tokenizer

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


def of_last_version(bucket):
    """The policy of a run's newest version, computed as trainer and sampler do."""
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        model = open_model(Path(folder), config.train.adapter)
    open_source("bf16", model).restore(load_mirror(bucket, run))
    return model.eval()


def from_directory(folder):
    settings = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=settings, dtype=torch.float32, local_files_only=True
    )


IDS = torch.arange(20)[None]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers in an old way.
def test_a_pulled_directory_is_one_that_peft_loads(started, tmp_path, capsys):
    import peft

    train(started)
    wanted = of_last_version(started)(input_ids=IDS).logits
    whole, only = tmp_path / "whole", tmp_path / "only"
    assert main(["pull", started.url, str(whole), "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert main(["pull", started.url, str(only), "--adapter", "--json"]) == 0
    pulled = json.loads(capsys.readouterr().out)
    assert pulled["version"] == VERSIONS
    assert pulled["bytes"] < everything["bytes"] - 20_000, "the base is not fetched"
    for folder in (whole, only):
        base = from_directory(tmp_path / "model")
        loaded = peft.PeftModel.from_pretrained(base, str(folder)).eval()
        assert torch.equal(loaded(input_ids=IDS).logits, wanted)
        assert not torch.allclose(loaded.unload()(input_ids=IDS).logits, wanted, atol=1e-4)
    assert main(["pull", started.url, str(only), "--adapter", "--version", "1"]) == 0
    loaded = peft.PeftModel.from_pretrained(from_directory(tmp_path / "model"), str(only))
    assert not torch.equal(loaded.eval()(input_ids=IDS).logits, wanted)


def test_a_merged_directory_is_a_plain_model(started, tmp_path, capsys):
    train(started)
    wanted = of_last_version(started)(input_ids=IDS).logits
    out = tmp_path / "merged"
    assert main(["merge", started.url, str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])["merge"]
    assert len(report["layers"]) == 14
    assert 0.5 < report["total"]["kept"] <= 1.5
    gap = (from_directory(out).eval()(input_ids=IDS).logits - wanted).abs().max()
    assert float(gap.detach()) < 0.05, "rounded to bf16 once more, and no more than that"
    assert main(["merge", started.url, str(out)]) == 2, "never over something else"
    refused = ["merge", started.url, str(tmp_path / "none"), "--min-kept", "1"]
    changed = report["total"]["kept"] < 1
    assert main(refused) == (2 if changed else 0)
    assert (tmp_path / "none").exists() != changed
    assert not list(tmp_path.glob(".*.merging"))


def test_a_run_starts_from_an_adapter_of_peft(started, tmp_path):
    """The adapter of one run is the start of the next, to the bit."""
    train(started)
    assert main(["pull", started.url, str(tmp_path / "a"), "--adapter"]) == 0
    settings = {"kind": "lora", "rank": 4, "alpha": 8.0, "init": str(tmp_path / "a")}
    (tmp_path / "next").mkdir()
    after = start(tmp_path / "next", adapter=settings)
    run, _ = open_run(started)
    last = load_mirror(started, run)
    first = load_mirror(after, open_run(after)[0], at=0)
    assert all(np.array_equal(bits, last.tensors[name]) for name, bits in first.tensors.items())
    digests = train(after)
    assert len(set(digests)) == VERSIONS + 1
    assert verify_training(after).exact
    wrong = settings | {"rank": 8}
    (tmp_path / "wrong").mkdir()
    with pytest.raises(InputError, match="rank 4 and scale 2"):
        start(tmp_path / "wrong", adapter=wrong)


@pytest.mark.parametrize(
    ("command", "said"), [(["merge"], "has no adapter"), (["pull", "--adapter"], "has no adapter")]
)
def test_a_run_without_an_adapter_is_refused(command, said, tmp_path, capsys):
    bucket = start(tmp_path, adapter={"kind": "none"})
    name, *options = command
    assert main([name, bucket.url, str(tmp_path / "m"), *options]) == 2
    assert said in capsys.readouterr().err


def test_what_vllm_cannot_serve_of_the_models_layers_is_refused_before_anything_is_stored(tmp_path):
    """The configuration names layers by a last part, which in this model is a stack of experts."""
    sizes = BuildConfig(
        family="qwen3_moe", hidden_size=32, layers=1, head_size=16, feed_forward_size=32,
        experts=4, experts_per_token=2, context=64,
    )  # fmt: skip
    save_model(build_model(sizes, seed=0), byte_tokenizer(), tmp_path / "model")
    raw = {
        "name": "x",
        "model": {"path": str(tmp_path / "model")},
        "train": {"adapter": {"kind": "lora", "targets": ["q_proj", "down_proj"]}},
        "rollout": {"engine": "vllm"},
    }
    config = parse_config(raw, source="s")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    with pytest.raises(InputError, match=r"adapter of experts in vLLM: \S*experts\.down_proj"):
        start_run(bucket, config, tmp_path / "model")
    assert find_run(bucket) is None


def test_dropout_is_refused_by_name():
    raw = {"name": "x", "train": {"adapter": {"kind": "lora", "dropout": 0.1}}}
    with pytest.raises(InputError, match=r"adapter\.dropout has no effect"):
        parse_config(raw, source="s")
