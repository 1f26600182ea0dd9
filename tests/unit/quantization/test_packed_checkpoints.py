"""Reading packed checkpoints, and packing plain ones while they are read."""

from __future__ import annotations

import json
import re

import pytest
import safetensors.torch
import torch
import transformers

from deltawire.config import AdapterConfig
from deltawire.errors import CorruptError, InputError
from deltawire.export.adapter import load_adapted
from deltawire.export.models import save_model
from deltawire.export.source import open_source
from deltawire.packed_formats import PACKED
from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.experts import find_experts
from deltawire.quantization.formats import open_format
from deltawire.quantization.packing import load_packed, pack_layers
from deltawire.train.build import byte_tokenizer

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "num_experts_per_tok": 2,
}
SCHEMES = {
    "int4-g32": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "fp8-block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    },
    "int8-row": {"num_bits": 8, "type": "int", "strategy": "channel"},
}


def build(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = (torch.randn(parameter.shape) * 0.05).bfloat16().float()
    return model


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A plain directory, and the model that it holds."""
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=128, moe_intermediate_size=128, num_experts=4
    )
    model = build(config)
    folder = tmp_path_factory.mktemp("qwen")
    save_model(model, byte_tokenizer(), folder)
    return folder, model


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    model = build(transformers.GptOssConfig(**SIZES, intermediate_size=128, num_local_experts=4))
    folder = tmp_path_factory.mktemp("gpt_oss")
    save_model(model, byte_tokenizer(), folder)
    return folder, model


def lora(form, **settings):
    return AdapterConfig(kind="lora", rank=4, targets=["experts"], packed=form, **settings)


def stored_tensors(name, weight, form):
    """A layer's tensors as compressed-tensors stores them."""
    parts = form.quantize(weight)
    if form.bits == 4:
        kept = {f"{name}_packed": parts["codes"], f"{name}_scale": parts["scales"]}
        if form.name == "int4-g32":
            kept[f"{name}_packed"] = parts["codes"].view(torch.int32)
            kept[f"{name}_shape"] = torch.tensor(weight.shape)
        if form.name == "nvfp4":
            kept[f"{name}_global_scale"] = parts["global_scale"][:1].clone()
        return kept
    dtype = torch.float8_e4m3fn if form.name == "fp8-block" else torch.int8
    return {name: parts["codes"].view(dtype), f"{name}_scale": parts["scales"]}


def pack_directory(
    source, out, form, *, names=r".*\.experts\.\d+\..*", method="compressed-tensors"
):
    """Writes a plain directory again with packed experts."""
    out.mkdir()
    kept = {}
    for name, tensor in safetensors.torch.load_file(source / "model.safetensors").items():
        if not re.fullmatch(names, name):
            kept[name] = tensor
        elif method == "fp8":
            parts = form.quantize(tensor)
            kept[name] = parts["codes"].view(torch.float8_e4m3fn)
            kept[f"{name}_scale_inv"] = parts["scales"]
        else:
            kept |= stored_tensors(name, tensor, form)
    safetensors.torch.save_file(kept, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_bytes())
    config["quantization_config"] = (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}
        if method == "fp8"
        else {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEMES[form.name]}},
        }
    )
    (out / "config.json").write_text(json.dumps(config))
    return out


def expected_stack(model, layer, stack, form):
    """The dequantized stack, packed matrix by matrix as a checkpoint holds them."""
    weight = model.get_submodule(layer).get_parameter(stack).detach()
    matrices = weight.chunk(2, dim=1) if stack == "gate_up_proj" else [weight]
    done = [torch.stack([dequantize(form, form.quantize(one)) for one in m]) for m in matrices]
    return torch.cat(done, dim=1)


@pytest.mark.parametrize("form", sorted(PACKED))
def test_a_plain_directory_is_packed_while_it_is_read(qwen, form):
    folder, model = qwen
    packed = load_adapted(folder, lora(form), seed=0)
    for layer, experts in find_experts(packed).items():
        for stack in ("gate_up_proj", "down_proj"):
            found = getattr(experts, stack).dequantized()
            assert torch.equal(found, expected_stack(model, layer, stack, open_format(form)))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(packed.get_parameter(name), model.get_parameter(name))


@pytest.mark.parametrize("form", sorted(PACKED))
def test_packed_directories_keep_their_codes(qwen, tmp_path, form):
    folder, model = qwen
    native = open_format(form)
    packed_folder = pack_directory(folder, tmp_path / "packed", native)
    packed = transformers.AutoModelForCausalLM.from_config(model.config)
    pack_layers(packed, form)
    report = load_packed(packed, packed_folder)
    assert report.native == 2 * 4 * 3
    assert not report.errors
    for layer, experts in find_experts(packed).items():
        for stack in ("gate_up_proj", "down_proj"):
            found = getattr(experts, stack).dequantized()
            assert torch.equal(found, expected_stack(model, layer, stack, native))


def test_deepseeks_layout_is_read(qwen, tmp_path):
    folder, model = qwen
    native = open_format("fp8-block")
    packed_folder = pack_directory(
        folder,
        tmp_path / "packed",
        native,
        names=r".*(\.experts\.\d+\.|q_proj|k_proj).*weight",
        method="fp8",
    )
    packed = transformers.AutoModelForCausalLM.from_config(model.config)
    pack_layers(packed, "fp8-block", ["model.layers.0.self_attn.q_proj"])
    report = load_packed(packed, packed_folder)
    assert report.native == 2 * 4 * 3 + 1
    linear = packed.get_submodule("model.layers.0.self_attn.q_proj")
    exact = model.get_parameter("model.layers.0.self_attn.q_proj.weight").detach()
    assert torch.equal(linear.weight.dequantized(), dequantize(native, native.quantize(exact)))
    plain = packed.get_parameter("model.layers.1.self_attn.k_proj.weight").detach()
    exact = model.get_parameter("model.layers.1.self_attn.k_proj.weight").detach()
    assert torch.equal(plain, dequantize(native, native.quantize(exact)).float()), "read as bf16"


def test_gpt_oss_layout_is_read(gpt_oss, tmp_path):
    folder, model = gpt_oss
    form = open_format("mxfp4")
    kept = {}
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            parts = form.quantize(tensor.transpose(1, 2))
            kept[f"{name}_blocks"] = parts["codes"].unflatten(-1, (-1, 16)).contiguous()
            kept[f"{name}_scales"] = parts["scales"]
        else:
            kept[name] = tensor
    (tmp_path / "packed").mkdir()
    safetensors.torch.save_file(kept, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    found, made = (transformers.AutoModelForCausalLM.from_config(model.config) for _ in range(2))
    for one in (found, made):
        pack_layers(one, "mxfp4")
    assert load_packed(found, tmp_path / "packed").native == 4
    report = load_packed(made, folder)
    assert len(report.errors) == 4
    assert all(0.08 < error < 0.15 for error in report.errors.values())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, made.get_parameter(name)), name


def test_a_checkpoint_of_one_format_packs_as_another(qwen, tmp_path):
    folder, model = qwen
    packed_folder = pack_directory(folder, tmp_path / "packed", open_format("int4-g32"))
    packed = transformers.AutoModelForCausalLM.from_config(model.config)
    pack_layers(packed, "int8-row")
    report = load_packed(packed, packed_folder)
    assert report.native == 0
    assert all(error < 0.01 for error in report.errors.values())


@pytest.mark.parametrize(
    "change",
    [
        {"symmetric": False},
        {"group_size": 64},
        {"num_bits": 3},
        {"actorder": "group"},
        {"strategy": "channel"},
    ],
)
def test_another_grid_is_refused_by_name(qwen, tmp_path, change):
    folder, model = qwen
    out = pack_directory(folder, tmp_path / "packed", open_format("int4-g32"))
    config = json.loads((out / "config.json").read_bytes())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (out / "config.json").write_text(json.dumps(config))
    packed = transformers.AutoModelForCausalLM.from_config(model.config)
    pack_layers(packed, "int4-g32")
    with pytest.raises(InputError, match="unsupported grid"):
        load_packed(packed, out)


def damaged(kept):
    name = next(one for one in kept if one.endswith("_scale"))
    yield (
        f"^{re.escape(name.removesuffix('_scale'))}: a scale .* is not finite",
        {**kept, name: kept[name] * torch.nan},
    )
    yield "lacks", {one: tensor for one, tensor in kept.items() if one != name}
    yield (
        r"_proj\.weight: the scales .* instead of",
        {**kept, name: kept[name][:, :-1].contiguous()},
    )
    codes = name.replace("_scale", "_packed")
    yield "columns", {**kept, codes: kept[codes][:, :-4].contiguous()}
    other = next(one for one in kept if one.endswith("input_layernorm.weight"))
    yield "is missing", {one: tensor for one, tensor in kept.items() if one != other}
    yield "model's is", {**kept, other: kept[other][:5].clone()}


@pytest.mark.parametrize("number", range(6))
def test_damaged_directories_are_refused(qwen, tmp_path, number):
    folder, model = qwen
    out = pack_directory(folder, tmp_path / "packed", open_format("int4-g32"))
    kept = safetensors.torch.load_file(out / "model.safetensors")
    message, tensors = list(damaged(kept))[number]
    safetensors.torch.save_file(tensors, out / "model.safetensors", {"format": "pt"})
    packed = transformers.AutoModelForCausalLM.from_config(model.config)
    pack_layers(packed, "int4-g32")
    with pytest.raises((CorruptError, InputError), match=message):
        load_packed(packed, out)


def test_columns_that_are_no_whole_groups_are_refused_with_the_layer(tmp_path):
    sizes = {**SIZES, "moe_intermediate_size": 40}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**sizes))
    message = r"^model\.layers\.0\.mlp\.experts: 40 columns are not a multiple of the 32 "
    with pytest.raises(InputError, match=message) as caught:
        pack_layers(model, "int4-g32")
    assert caught.value.hint


def test_a_model_without_experts_is_refused():
    config = transformers.Qwen3Config(
        **{name: size for name, size in SIZES.items() if name != "num_experts_per_tok"},
        intermediate_size=96,
    )
    with pytest.raises(InputError, match="no fused experts"):
        pack_layers(transformers.AutoModelForCausalLM.from_config(config), "mxfp4")


def test_packed_bytes_are_published_as_they_are(qwen):
    folder, _ = qwen
    model = load_adapted(folder, lora("nvfp4", packed_layers=["o_proj"]), seed=0)
    source = open_source("bf16", model)
    specs = {spec.name: spec for spec in source.specs()}
    name = "model.layers.0.mlp.experts.gate_up_proj.codes"
    assert (specs[name].dtype, specs[name].shape) == ("U8", (4, 256, 64))
    assert specs["model.layers.0.self_attn.o_proj.weight.codes"].dtype == "U8"
    adapter = "base_model.model.model.layers.0.mlp.experts.down_proj.lora_B"
    assert (specs[adapter].dtype, specs[adapter].shape) == ("BF16", (4, 128, 4))
    assert source.trained().keys() == {one for one in specs if "lora_" in one}
