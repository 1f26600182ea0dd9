"""Runs that train an adapter: what is sent, pulled and merged, and resumed to the same bits."""

from __future__ import annotations

import json
import sys
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
from deltawire.launch.branches.forking import fork_run
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


@pytest.mark.parametrize(
    "offload", [pytest.param("none", marks=[pytest.mark.drills, pytest.mark.long]), "optimizer"]
)
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


@pytest.mark.drills
def test_the_tools_over_versions_work_on_an_adapter(started, tmp_path, capsys):
    """show, diff, why, bisect and fork read a base and an adapter as they read a whole model."""
    digests = train(started)

    def asked(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    url = started.url
    shown = asked("show", f"{url}@3")["bits"]
    assert {one["name"] for one in shown["movers"]} <= set(
        load_mirror(started, find_run(started)).tensors
    )
    assert asked("diff", f"{url}@1", f"{url}@3")["changed"] > 0
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": "2+2=", "answer": "4"}))
    found = asked("why", url, "--on", str(questions), "--steps", "1")
    assert found["residual_share"] < 0.05
    assert found["groups"]
    assert all(one["exact"] for one in found["groups"])
    script = tmp_path / "check.py"
    script.write_text("import os, sys; sys.exit(int(os.environ['DELTAWIRE_VERSION']) >= 3)")
    words = [
        "bisect",
        url,
        "--good",
        "0",
        "--bad",
        "4",
        "--state",
        str(tmp_path / "state"),
        "--json",
    ]
    assert main([*words, "--", sys.executable, str(script)]) == 0
    assert json.loads(capsys.readouterr().out)["culprit"] == 3
    # Version 2 has a state, which is shared; that of version 3 is computed again.
    for version, state in ((2, "shared"), (3, "computed")):
        made = fork_run(started, find_run(started), version, f"at{version}")
        assert made.state == state
        fork = open_bucket(made.url)
        assert read_manifest(fork, made.run, version).digest == digests[version]
        assert load_mirror(fork, made.run).digest.hex() == digests[version]


@pytest.mark.drills
def test_a_merged_directory_is_a_derived_edge_that_in_toto_accepts(started, tmp_path, monkeypatch):
    """The merge is made again: a directory with one other byte is refused."""
    program = pytest.importorskip("in_toto.in_toto_verify").main
    pytest.importorskip("in_toto_attestation")
    train(started, to=2)
    key, merged, proof = tmp_path / "key", tmp_path / "merged", tmp_path / "proof"
    assert main(["keygen", str(key)]) == 0
    assert main(["merge", started.url, str(merged)]) == 0
    words = ["prove", started.url, "--key", str(key), "--derived", f"merge={merged}"]
    assert main([*words, "--out", str(proof)]) == 0
    assert list((proof / "statements").glob("merge-version-0000000002-*"))
    links = ["--layout", str(proof / "links/root.layout"), "--link-dir", str(proof / "links")]
    monkeypatch.setattr(
        "sys.argv", ["in-toto-verify", *links, "--verification-keys", str(proof / "key.pem")]
    )
    with pytest.raises(SystemExit) as ended:
        program()
    assert not ended.value.code
    weights = next(merged.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main([*words, "--out", str(tmp_path / "again")]) == 2
