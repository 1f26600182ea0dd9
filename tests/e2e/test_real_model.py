"""Weights that someone else pretrained: skipped by name without them (make real-model)."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from deltawire.cli.main import main
from deltawire.config import load_config
from deltawire.train.dither import dither

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2-135m"
EXAMPLE = ROOT / "examples" / "real"
needs_model = pytest.mark.skipif(
    not MODEL.is_dir(), reason="needs models/smollm2-135m: make real-model writes it"
)


def reward():
    spec = importlib.util.spec_from_file_location("rewards_of_real", EXAMPLE / "rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.last_number


def test_the_last_number_counts():
    row = {"answer": "12"}
    assert reward()("5 + 7 is 12.", row) == 1.0
    assert reward()("12 is not 13", row) == 0.1
    assert reward()("", row) == 0.1


def test_every_sum_is_in_the_file_once():
    rows = [json.loads(line) for line in (EXAMPLE / "sums.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == 100
    for row in rows:
        left, _, right = row["question"].partition(" + ")
        assert int(row["answer"]) == int(left) + int(right)


@needs_model
def test_the_example_is_ready_to_run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("DELTAWIRE_TRUSTED_MODULES", "rewards")
    assert main(["run", "examples/real/sums.toml", "--dry-run"]) == 0
    assert "models/smollm2-135m" in capsys.readouterr().out
    assert load_config(EXAMPLE / "sums.toml").train.masters == "dithered"


@needs_model
@pytest.mark.parametrize(("size", "least"), [(2.5e-6, 0.6), (2.5e-5, 0.95), (2.5e-4, 0.99)])
def test_most_of_a_small_change_reaches_a_pretrained_models_weights(size, least):
    """Gaussian changes of a layer; from the checkpoint's own values almost nothing would arrive."""
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.layers.10.mlp.down_proj.weight")
    shares = {}
    for start in ("dithered", "published"):
        master = weight.float()
        if start == "dithered":
            dither(master, torch.bfloat16, seed=0, name="w")
        assert torch.equal(master.bfloat16(), weight)
        change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * size
        served = (master + change).bfloat16().double() - weight.double()
        shares[start] = float((served * change).sum() / change.double().square().sum())
    assert shares["dithered"] == pytest.approx(1, abs=1 - least)
    assert shares["published"] < shares["dithered"] * math.sqrt(least)
