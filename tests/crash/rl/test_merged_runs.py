"""Runs that publish merged weights: what readers get, what rounding leaves, and resuming."""

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
from deltawire.config import BuildConfig, parse_config
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, open_model
from deltawire.export.models import fetch_model_files, load_model
from deltawire.export.source import open_source
from deltawire.placement.live import LiveWeights
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket
from deltawire.sync import load_mirror, read_history, read_manifest

VERSIONS = 4
DENSE = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=64)
EXPERTS = BuildConfig(
    family="qwen3_moe",
    hidden_size=32,
    layers=2,
    head_size=16,
    feed_forward_size=32,
    experts=4,
    experts_per_token=2,
    context=64,
)
LORA = {"kind": "lora", "rank": 4, "alpha": 8.0}
PACKED = LORA | {"targets": ["q_proj", "experts"], "packed": "int4-g32", "merge_floor": 0.0}


def start(
    folder: Path, sizes: BuildConfig = DENSE, adapter: dict[str, Any] = LORA, **train: Any
) -> Bucket:
    settings = {
        "versions": VERSIONS,
        "groups_per_step": 2,
        "max_staleness": 100,
        "checkpoint_every": 2,
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup_steps": 1},
        "exporter": "merged",
        "adapter": adapter,
        **train,
    }
    folder.mkdir()
    return start_with_groups(folder, groups=2 * VERSIONS, train=settings, sizes=sizes)


def trainer_of(bucket: Bucket, *, to: int = VERSIONS) -> Trainer:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    config = msgspec.structs.replace(
        config, train=msgspec.structs.replace(config.train, versions=to)
    )
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        model = open_model(Path(folder), config.train.adapter, seed=config.seed)
    return Trainer(process, run, config, model)


def train(bucket: Bucket, *, to: int = VERSIONS, die: bool = False) -> list[str]:
    trainer = trainer_of(bucket, to=to)
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    trainer.loop()
    run, _ = open_run(bucket)
    return [one.digest for one in [read_manifest(bucket, run, 0), *read_history(bucket, run)]]


def test_readers_see_a_plain_model_that_changes_by_small_deltas(tmp_path, capsys):
    bucket = start(tmp_path / "a")
    trainer = trainer_of(bucket)
    trainer.loop()
    run, config = open_run(bucket)
    base = load_model(tmp_path / "a" / "model")
    assert {one.name for one in run.tensors} == set(dict(base.named_parameters()))
    first, last = load_mirror(bucket, run, at=0), load_mirror(bucket, run)
    plain = open_source("bf16", base).tensors()
    for name, bits in first.tensors.items():
        assert np.array_equal(bits, plain[name].view(torch.uint16).numpy().reshape(bits.shape))
    moved = {
        name for name, bits in last.tensors.items() if not np.array_equal(bits, first.tensors[name])
    }
    assert moved == {name for name in last.tensors if "proj" in name}
    whole = sum(one.nbytes for one in first.tensors.values())
    for version in range(1, VERSIONS + 1):
        manifest = read_manifest(bucket, run, version)
        assert manifest.anchor is None
        assert manifest.delta.bytes < whole / 2

    # The sampler's model has no adapter, and computes what the trainer does but for rounding.
    with fetch_model_files(bucket, run) as folder:
        served = open_model(Path(folder), config.train.served_adapter)
    assert not any(".lora_" in name for name, _ in served.named_parameters())
    LiveWeights(served, run.tensors).load(last)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        gap = served.eval()(input_ids=ids).logits - trainer.masters.model.eval()(ids).logits
    assert 0 < float(gap.abs().max()) < 0.05
    assert verify_training(bucket).exact
    assert main(["fsck", bucket.url]) == 0

    trainer.process.events.flush()
    capsys.readouterr()
    assert main(["status", bucket.url, "--json"]) == 0
    assert 0.5 < json.loads(capsys.readouterr().out)["merge_kept"] <= 1.5
    assert main(["status", bucket.url]) == 0
    assert "merge keeps" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("sizes", "adapter"),
    [pytest.param(DENSE, LORA, marks=[pytest.mark.drills, pytest.mark.long]), (EXPERTS, PACKED)],
)
def test_after_crashes_the_same_bits(tmp_path, sizes, adapter):
    whole = train(start(tmp_path / "a", sizes, adapter))
    assert len(set(whole)) > 1
    bucket = start(tmp_path / "b", sizes, adapter)
    for version in (1, 3):
        train(bucket, to=version, die=True)
    assert train(bucket) == whole


def test_the_state_of_version_0_is_whole(tmp_path):
    """Restoring it changes no weight that the next step computes with."""
    masters = trainer_of(start(tmp_path / "a")).masters
    before = {name: one.clone() for name, one in masters.model.named_parameters()}
    masters.restore({name: one.clone() for name, one in masters.state().items()})
    for name, one in masters.model.named_parameters():
        assert torch.equal(one, before[name]), name


def test_four_bits_keep_little_of_a_small_change(tmp_path):
    bucket = start(tmp_path / "a", EXPERTS, PACKED, optimizer={"learning_rate": 1e-4})
    trainer = trainer_of(bucket)
    trainer.loop()
    report = trainer.masters.source.report
    packed = [one for one in report.layers if ".experts." in one.name]
    others = [one for one in report.layers if "q_proj" in one.name]
    assert len(packed) == 4
    assert all(one.kept < 0.2 and one.size < 0.05 for one in packed)
    assert min(one.kept for one in others) > max(one.kept for one in packed)
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        served = open_model(Path(folder), config.train.served_adapter)
    LiveWeights(served, run.tensors).load(load_mirror(bucket, run))
    assert not any(one.name.startswith(PREFIX) for one in run.tensors)


def test_a_merge_below_the_floor_stops_at_a_checkpoint(tmp_path):
    bucket = start(
        tmp_path / "a", adapter=LORA | {"merge_floor": 0.9}, optimizer={"learning_rate": 1e-6}
    )
    with pytest.raises(InputError, match=r"version 2 keeps .* and the floor is 90%"):
        train(bucket)
    run, _ = open_run(bucket)
    assert read_manifest(bucket, run, 1) is not None
    assert read_manifest(bucket, run, 2) is None


def test_later_versions_are_no_base(tmp_path):
    bucket = start(tmp_path / "a")
    trainer = trainer_of(bucket)
    trainer.loop()
    run, _ = open_run(bucket)
    with pytest.raises(InputError, match="the base is version 0"):
        trainer.masters.source.restore(load_mirror(bucket, run))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"adapter": {"kind": "none"}}, "needs an adapter"),
        ({"adapter": LORA | {"init": "x"}}, "starts from the base"),
        ({"adapter": PACKED | {"merge_floor": 0.25}}, "bits keep at most 1 %"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, said):
    raw = {"name": "x", "train": {"exporter": "merged", "adapter": LORA} | change}
    with pytest.raises(InputError, match=said):
        parse_config(raw, source="s")


def test_fleets_that_serve_no_adapters_take_merged_weights():
    raw = {"name": "x", "train": {"adapter": LORA | {"rank": 1024}}, "rollout": {"engine": "vllm"}}
    with pytest.raises(InputError, match="rank 1024 is above"):
        parse_config(raw, source="s")
    raw["train"]["exporter"] = "merged"
    assert parse_config(raw, source="s").train.served_adapter.kind == "none"
    raw["retain"] = {"versions": 5}
    with pytest.raises(InputError, match="would delete version 0"):
        parse_config(raw, source="s")
