"""``pull`` says what it waits for, and what it does not write."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deltawire.cli.main import main
from deltawire.launch import pull
from deltawire.sync import open_publisher
from deltawire.wire.run import TensorSpec


def test_it_waits_for_the_folder_the_run_and_the_first_version(tmp_path, monkeypatch, capsys):
    place = tmp_path / "bucket"
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            place.mkdir()
        if len(pauses) == 4:
            open_publisher(place, {"a": torch.ones(8)}, compaction_strides=()).close()
        if len(pauses) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(pull, "time", SimpleNamespace(**vars(time) | {"sleep": pause}))
    with pytest.raises(KeyboardInterrupt):
        pull.pull_directory(str(place), tmp_path / "out", follow=True)
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("waiting for its first version") == 1
    assert "version 0 " in told
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_without_follow_it_does_not_wait(tmp_path, capsys):
    assert main(["pull", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "there is no bucket at" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["attention", "experts"])
def test_a_directory_with_adapters_of_experts_names_the_option_that_is_needed(
    tmp_path, capsys, kind
):
    ends = {
        "attention": "self_attn.q_proj.lora_A.weight",
        "experts": "mlp.experts.down_proj.lora_A",
    }
    name = f"base_model.model.model.layers.0.{ends[kind]}"
    specs = [TensorSpec(name=name, dtype="F32", shape=(8,))]
    open_publisher(tmp_path / "run", {name: np.ones(8, np.float32)}, specs=specs).close()
    assert main(["pull", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert ("pull it with --adapter" in " ".join((told.out + told.err).split())) == (
        kind == "experts"
    )
