"""``deltawire pack``: directories that are written packed, what is lost, and who reads them."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
import transformers

from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.export.models import save_model
from deltawire.packed_formats import PACKED
from deltawire.quantization import packed_directory
from deltawire.quantization.experts import find_experts
from deltawire.quantization.packed_directory import pack_directory
from deltawire.quantization.packing import load_packed, pack_layers
from deltawire.train.build import byte_tokenizer

MOE = transformers.Qwen3MoeConfig(
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=300,
    num_experts=4,
    num_experts_per_tok=2,
)
ERRORS = {
    "int4-g32": (0.08, 0.11),
    "mxfp4": (0.10, 0.13),
    "nvfp4": (0.08, 0.11),
    "fp8-block": (0.02, 0.03),
    "int8-row": (0.005, 0.012),
}


def build(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    save_model(build(MOE), byte_tokenizer(), folder)
    return folder


def loaded(folder, form):
    model = transformers.AutoModelForCausalLM.from_config(MOE)
    pack_layers(model, form)
    return load_packed(model, folder), model


@pytest.mark.parametrize("form", sorted(PACKED))
def test_a_run_reads_what_is_written_to_the_same_codes(plain, tmp_path, form, monkeypatch):
    monkeypatch.setattr(packed_directory, "SHARD_BYTES", 100_000)
    report = pack_directory(plain, tmp_path / "out", form)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert sorted(report.errors) == sorted(
        f"model.layers.{layer}.mlp.experts.{kind}"
        for layer in range(2)
        for kind in ("gate_proj", "up_proj", "down_proj")
    )
    low, high = ERRORS[form]
    assert all(low < error < high for error in report.errors.values())
    (read, found), (_, made) = loaded(tmp_path / "out", form), loaded(plain, form)
    assert read.native == 2 * 4 * 3
    assert not read.errors
    for name, experts in find_experts(found).items():
        for stack in ("gate_up_proj", "down_proj"):
            theirs = getattr(made.get_submodule(name), stack)
            assert torch.equal(getattr(experts, stack).dequantized(), theirs.dequantized())


def test_a_directory_in_the_format_packs_without_loss(plain, tmp_path):
    pack_directory(plain, tmp_path / "once", "int4-g32")
    report = pack_directory(tmp_path / "once", tmp_path / "twice", "int4-g32")
    assert (report.native, report.errors) == (2 * 4 * 3, {})
    first, second = (
        safetensors.torch.load_file(tmp_path / one / "model-00001-of-00001.safetensors")
        for one in ("once", "twice")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_command_prints_the_error_of_each_layer(plain, tmp_path, capsys):
    arguments = ["pack", str(plain), "--format", "int4-g32", "--layers", "o_proj", "--json"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["errors"]) == 2 * 3 + 2
    assert not found["lossless"]
    assert 0.08 < found["error"] < 0.11
    assert main(["pack", str(tmp_path / "out"), "--format", "int4-g32", "--layers", "o_proj",
                 "--out", str(tmp_path / "again")]) == 0  # fmt: skip
    assert "26 tensors were int4-g32 already and keep their codes: no loss" in (
        capsys.readouterr().err.replace("\n", " ")
    )


def test_other_libraries_find_the_scheme_in_the_configuration(plain, tmp_path):
    pack_directory(plain, tmp_path / "out", "int4-g32")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (stated["quant_method"], stated["format"]) == ("compressed-tensors", "pack-quantized")
    assert "model.layers.0.self_attn.q_proj" in stated["ignore"]
    assert not any("experts.0" in name for name in stated["ignore"])
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, vocab_size=300), "no experts to pack"),
        (transformers.GptOssConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=300,
            num_local_experts=2, num_experts_per_tok=2), "fused stack"),
    ],
    ids=["dense", "fused"],
)  # fmt: skip
def test_models_that_cannot_be_packed_are_refused_and_leave_nothing(tmp_path, config, message):
    (tmp_path / "in").mkdir()
    save_model(build(config), byte_tokenizer(), tmp_path / "in")
    with pytest.raises(InputError, match=message):
        pack_directory(tmp_path / "in", tmp_path / "out", "int4-g32")
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_an_existing_folder_is_not_written_to(plain, tmp_path):
    with pytest.raises(InputError, match="exists already"):
        pack_directory(plain, tmp_path, "int4-g32")
