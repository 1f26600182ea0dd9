"""Adapters made by PEFT load here and compute the same, and those of a run load in PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers

from deltawire.config import AdapterConfig
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, adapted, adapter_off
from deltawire.export.peft_directory import load_peft, write_peft
from deltawire.export.source import open_source
from deltawire.quantization.experts import ExpertAdapter

pytestmark = [
    # PEFT asks transformers in an old way, and says what it saves.
    pytest.mark.filterwarnings("ignore"),
]

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"intermediate_size": 48}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4}
        | {"num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
IDS = torch.arange(14)[None] % 61


def base(family: str, **changes: int):
    kind, sizes = FAMILIES[family]
    config = kind(**SIZES | sizes | changes, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    # The reference adds experts up in the order of their numbers, as ours do.
    model.config._experts_implementation = "eager"
    return model.eval()


def fill(model, seed: int = 1):
    """Give every factor of an adapter, and every trained copy, values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
        elif ".modules_to_save." in name:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


LINEAR = AdapterConfig(kind="lora", rank=4, alpha=6.0)
CASES = {
    "linear": ("llama", LINEAR, {"target_modules": "all-linear"}),
    "pattern": (
        "llama",
        AdapterConfig(
            kind="lora",
            rank=4,
            alpha=6.0,
            targets=["q_proj", "down_proj"],
            rank_pattern={r"layers\.1\.self_attn\.q_proj": 2, "down_proj": 3},
            alpha_pattern={"down_proj": 9.0},
        ),
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "down_proj": 3},
            "alpha_pattern": {"down_proj": 9.0},
        },
    ),
    "rslora": (
        "llama",
        AdapterConfig(kind="lora", rank=4, alpha=6.0, targets=["v_proj"], use_rslora=True),
        {"target_modules": ["v_proj"], "use_rslora": True},
    ),
    "embedding and head": (
        "llama",
        AdapterConfig(kind="lora", rank=4, alpha=6.0, targets=["embed_tokens", "lm_head"]),
        {"target_modules": ["embed_tokens", "lm_head"]},
    ),
    "trained copies": (
        "llama",
        AdapterConfig(
            kind="lora",
            rank=4,
            alpha=6.0,
            targets=["q_proj"],
            modules_to_save=["embed_tokens", "lm_head"],
        ),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "experts": (
        "qwen3_moe",
        AdapterConfig(
            kind="lora",
            rank=4,
            alpha=6.0,
            targets=["q_proj", "experts"],
            rank_pattern={"experts.down_proj": 2},
        ),
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 2},
        },
    ),
    "one stack": (
        "qwen3_moe",
        AdapterConfig(kind="lora", rank=4, alpha=6.0, targets=["down_proj"]),
        {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    ),
    "transposed experts": (
        "gpt_oss",
        AdapterConfig(kind="lora", rank=4, alpha=6.0, targets=["experts"]),
        {
            "target_modules": [],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
}


def made_by_peft(case: str, folder: Path, **changes: int):
    family, _, settings = CASES[case]
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings)
    model = fill(peft.get_peft_model(base(family, **changes), config))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_gives_the_same_logits_here(case, tmp_path):
    theirs = made_by_peft(case, tmp_path)
    family, config, _ = CASES[case]
    ours = adapted(base(family), config, seed=0)
    frozen = logits(ours)
    load_peft(ours, config, tmp_path)
    wanted = logits(theirs)
    found = logits(ours)
    if "expert" in case or "stack" in case:
        # PEFT adds each product to its matrix first.
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    else:
        assert torch.equal(found, wanted)
    assert (frozen - wanted).abs().max() > 0.02, "the adapter matters"
    with adapter_off(ours):
        assert torch.equal(logits(ours), logits(base(family)))


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_ours_gives_the_same_logits_in_peft(case, tmp_path):
    family, config, _ = CASES[case]
    ours = fill(adapted(base(family), config, seed=0))
    tensors = open_source("f32", ours).tensors()
    write_peft(tmp_path, ours, config, tensors, base="here")
    theirs = peft.PeftModel.from_pretrained(base(family), str(tmp_path))
    torch.testing.assert_close(logits(theirs), logits(ours), atol=2e-5, rtol=2e-5)
    again = adapted(base(family), config, seed=5)
    load_peft(again, config, tmp_path)
    assert torch.equal(logits(again), logits(ours))


def test_a_factor_that_experts_share_is_written_for_each(tmp_path):
    config = AdapterConfig(kind="lora", rank=4, targets=["experts"], shared_factor=True)
    ours = fill(adapted(base("qwen3_moe"), config, seed=0))
    write_peft(tmp_path, ours, config, open_source("f32", ours).tensors(), base="here")
    theirs = peft.PeftModel.from_pretrained(base("qwen3_moe"), str(tmp_path))
    torch.testing.assert_close(logits(theirs), logits(ours), atol=2e-5, rtol=2e-5)
    again = adapted(base("qwen3_moe"), config, seed=5)
    load_peft(again, config, tmp_path)
    assert torch.equal(logits(again), logits(ours))


def rewritten(folder: Path, change) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = change(safetensors.torch.load_file(file))
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, file)


def refused(case: str, folder: Path, said: str, **changes: int) -> None:
    family, config, _ = CASES[case]
    with pytest.raises(InputError, match=said):
        load_peft(adapted(base(family, **changes), config, seed=0), config, folder)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    made_by_peft("linear", tmp_path / "wide", hidden_size=48)
    refused("linear", tmp_path / "wide", "does not fit the base")
    made_by_peft("linear", tmp_path / "deep", num_hidden_layers=3)
    refused("linear", tmp_path / "deep", "has no such layer")
    made_by_peft("linear", tmp_path / "flat", num_hidden_layers=1)
    refused("linear", tmp_path / "flat", "lacks")
    made_by_peft("embedding and head", tmp_path / "other")
    name = f"{PREFIX}model.embed_tokens.base_layer.weight"
    rewritten(tmp_path / "other", lambda held: held | {name: held[name] + 1})
    refused("embedding and head", tmp_path / "other", "is of another base")


def swapped(tensors):
    """The adapter as PEFT before 0.19.1 wrote it: inputs and outputs of stacks exchanged."""
    found = {}
    for name, one in tensors.items():
        if ".experts." not in name or "lora_A" not in name:
            continue
        other = name.replace("lora_A", "lora_B")
        rank = len(one) // 4
        a = one.reshape(4, rank, -1)
        b = tensors[other].reshape(-1, rank, 4)
        found[name] = b.permute(2, 1, 0).reshape(4 * rank, -1)
        found[other] = a.permute(2, 1, 0).reshape(-1, rank * 4)
    return tensors | found


def test_swapped_axes_are_refused(tmp_path):
    made_by_peft("experts", tmp_path / "a")
    rewritten(tmp_path / "a", swapped)
    refused("experts", tmp_path / "a", "axes of .* swapped")
    made_by_peft("linear", tmp_path / "b")
    rewritten(tmp_path / "b", lambda held: {k: v.T for k, v in held.items()})
    refused("linear", tmp_path / "b", "its axes are swapped")


def test_axes_of_a_square_stack_are_known_by_the_release(tmp_path):
    """Inputs and outputs of down_proj are 32 each: both orders fit."""
    made_by_peft("one stack", tmp_path, moe_intermediate_size=32)
    family, config, _ = CASES["one stack"]
    model = adapted(base(family, moe_intermediate_size=32), config, seed=0)
    load_peft(model, config, tmp_path)
    for release in ("0.18.1", None):
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_bytes()) | {"peft_version": release}))
        with pytest.raises(InputError, match="swapped"):
            load_peft(model, config, tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 8}, "rank 8 and scale 0.75"),
        ({"lora_alpha": 8}, "scale 2"),
        ({"use_rslora": True}, "scale 3"),
        ({"use_dora": True}, "use_dora = True cannot be read"),
        ({"peft_type": "IA3"}, "peft_type = IA3"),
        ({"r": "many"}, "wrong kind"),
        ({"rank_pattern": {"(": 2}}, "wrong kind"),
    ],
)
def test_settings_that_differ_are_refused(change, said, tmp_path):
    made_by_peft("linear", tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    refused("linear", tmp_path, said)


def test_damaged_directories_are_refused(tmp_path):
    made_by_peft("linear", tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"junk")
    refused("linear", tmp_path / "a", "cannot be read")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    refused("linear", tmp_path / "a", "has no adapter_model.safetensors")
    refused("linear", tmp_path / "none", "holds no adapter")
    made_by_peft("linear", tmp_path / "b")
    rewritten(tmp_path / "b", lambda held: {k: v * float("nan") for k, v in held.items()})
    refused("linear", tmp_path / "b", "NaN")


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_nothing_is_refused(key):
    config = AdapterConfig(kind="lora", targets=["q_proj"], **{key: {r"layers\.7\.q_proj": 2}})
    with pytest.raises(InputError, match=rf"{key}: .* matches no layer of the adapter"):
        adapted(base("llama"), config, seed=0)


def test_tied_embeddings_are_refused():
    kind, sizes = FAMILIES["llama"]
    config = kind(**SIZES | sizes, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for change in ({"targets": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}):
        with pytest.raises(InputError, match="is tied"):
            adapted(model, AdapterConfig(kind="lora", **change), seed=0)


def test_adapters_of_experts_are_trained_for_each_expert():
    _, config, _ = CASES["experts"]
    model = fill(adapted(base("qwen3_moe"), config, seed=0))
    model(input_ids=IDS).logits.square().sum().backward()
    trained = {name for name, one in model.named_parameters() if one.grad is not None}
    assert trained == {
        name for name, one in model.named_parameters() if ".lora_" in name or ".adapters." in name
    }
    stacks = [one for one in model.modules() if isinstance(one, ExpertAdapter)]
    assert len(stacks) == 4
    assert all(bool(one.lora_A.grad.abs().sum(dim=(1, 2)).bool().any()) for one in stacks)
