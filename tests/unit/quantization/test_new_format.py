"""A packed format is one module and one entry: every part that asks about formats then knows it."""

import json

import int8_groups
import pytest
import torch
import transformers

from deltawire.cli.main import main
from deltawire.config import AdapterConfig
from deltawire.errors import InputError
from deltawire.export.models import save_model
from deltawire.packed_formats import PACKED, planned_bits
from deltawire.quantization.checkpoints import PackedCheckpoint
from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.formats import open_format
from deltawire.train.build import byte_tokenizer

NAME = "int8-g64"


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(PACKED, NAME, int8_groups.ENTRY)


@pytest.fixture
def model(tmp_path):
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=300,
        num_experts=2,
        num_experts_per_tok=1,
    )
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder = tmp_path / "plain"
    save_model(built, byte_tokenizer(), folder)
    return folder


def test_pack_writes_it_and_a_reader_knows_it_again(model, tmp_path, capsys):
    out = tmp_path / "packed"
    assert main(["pack", str(model), "--format", NAME, "--out", str(out), "--json"]) == 0
    capsys.readouterr()
    scheme = json.loads((out / "config.json").read_bytes())["quantization_config"]
    weights = scheme["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (8, 64)
    with PackedCheckpoint(model) as plain, PackedCheckpoint(out) as packed:
        assert packed.form is open_format(NAME)
        dense = {one.name: plain.read(one) for one in plain.weights()}
        found = [one for one in packed.weights() if one.parts]
        assert found
        for one in found:
            parts = packed.read_packed(one)
            assert parts["scales"].shape[-1] == dense[one.name].shape[-1] // 64
            gap = (dequantize(packed.form, parts) - dense[one.name]).float().abs().max()
            assert 0 < gap <= dense[one.name].float().abs().max() / 127


def test_a_configuration_and_a_merge_take_it():
    adapter = AdapterConfig(kind="lora", packed=NAME)
    assert adapter.contradiction() is None
    assert adapter.contradiction(merged=True) is None
    unknown = AdapterConfig(kind="lora", packed="int8-g65").contradiction()
    assert unknown is not None
    assert NAME in unknown[1]


def of_the_catalogue(printed):
    """The rows of named accelerators: those of this machine name its free memory."""
    return [row for row in json.loads(printed) if "this machine" not in row["accelerators"]]


def test_plans_take_it(capsys):
    assert planned_bits("int8-groups") == 8.25
    arguments = ["shapes", "qwen3-30b-a3b", "--mode", "lora", "--json"]
    assert main([*arguments, "--packing", "int8-groups"]) == 0
    ours = capsys.readouterr().out
    assert main([*arguments, "--packing", "int4"]) == 0
    assert of_the_catalogue(ours) != of_the_catalogue(capsys.readouterr().out)
    with pytest.raises(InputError, match="int8-groups"):
        planned_bits("int8-groups-of-65")
