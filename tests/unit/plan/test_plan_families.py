"""Parameter counts of descriptions, held against transformers' own modules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltawire.errors import InputError
from deltawire.plan.catalogue import catalogue
from deltawire.plan.configuration import decode_config
from deltawire.plan.families import FAMILIES, describe

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE = {**BASE, "intermediate_size": 96}
ROUTED = {**DENSE, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEPSEEK = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
DELTA_NET = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
CASES: list[dict[str, Any]] = [
    {**DENSE, "model_type": "llama"},
    {
        **DENSE,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    {**DENSE, "model_type": "mistral", "head_dim": 32},
    {**DENSE, "model_type": "qwen2"},
    {**DENSE, "model_type": "qwen3", "head_dim": 32},
    {
        **ROUTED,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "head_dim": 32,
        "mlp_only_layers": [1],
    },
    {**DENSE, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    {**DENSE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {
        **DENSE,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    {**DEEPSEEK, "model_type": "deepseek_v3"},
    {**DEEPSEEK, "model_type": "deepseek_v3", "q_lora_rank": None, "attention_bias": True},
    {
        **DEEPSEEK,
        "model_type": "glm4_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    {
        **DEEPSEEK,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 9,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
    },
    {**DENSE, **DELTA_NET, "model_type": "qwen3_5_text"},
    {
        **ROUTED,
        **DELTA_NET,
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
    },
    {
        **BASE,  # without intermediate_size, which is another name of moe_intermediate_size here
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "model_type": "deepseek_v4",
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "hc_mult": 4,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    {
        **DEEPSEEK,
        "model_type": "kimi_linear",
        "q_lora_rank": None,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
        },
    },
]


@pytest.mark.parametrize("config", CASES, ids=lambda config: config["model_type"])
def test_counts_equal_those_of_transformers(config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    ours = describe(decode_config(json.dumps(config).encode(), where="test"), name="test")
    assert ours.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert sum(ours.parts().values()) == ours.parameters


def test_every_family_is_compared() -> None:
    compared = {config["model_type"] for config in CASES}
    assert set(FAMILIES) - compared == {"kimi_k2"}  # DeepSeek-V3's modules under another name


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_catalogue_counts_agree_with_the_published_ones(name: str) -> None:
    """Published counts are rounded; Qwen3.5-27B's includes a vision tower and an extra layer."""
    entry = catalogue()[name]
    apart = abs(entry.describe().parameters / entry.published_parameters - 1)
    assert apart < (0.035 if name == "qwen3p5-27b" else 0.02)


def test_kimi_k3_counts_equal_the_published_weight_list() -> None:
    """Published: 1,503,647,073,024 stored values, experts at 4 bits in bytes, a scale for 32."""
    model = catalogue()["kimi-k3"].describe()
    stored = model.parameters - model.expert_parameters
    stored += model.expert_parameters * (1 / 2 + 1 / 32)
    vision_and_projector = 27 * (2 * 4096 * 1024 + 1024 * 1536 + 4608 * 1024 + 2 * 1024)
    vision_and_projector += 1024 + 64 * 64 * 1024 + 1024 * 3 * 14 * 14
    vision_and_projector += 7168 + 4096 * 4096 + 7168 * 4096
    correction_biases = 92 * 896
    assert stored + vision_and_projector + correction_biases == 1_503_647_073_024


def test_active_parameters_count_only_chosen_experts() -> None:
    model = catalogue()["qwen3-30b-a3b"].describe()
    assert 2.9e9 < model.active_parameters < 3.4e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "unknown model type 'gpt2'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"hidden_size": -1}, "not a usable config.json"),
        ({"hidden_size": 1e30}, "not a usable config.json"),
        ({"num_hidden_layers": 10**9}, "not a usable config.json"),
        ({"vocab_size": "many"}, "not a usable config.json"),
    ],
)
def test_wrong_configurations_are_refused(change: dict[str, Any], message: str) -> None:
    raw = json.dumps({**DENSE, "model_type": "llama", **change}).encode()
    with pytest.raises(InputError, match=message):
        describe(decode_config(raw, where="config.json"), name="test")


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"text_config":' * 2000, b" " * (5 << 20)]
)
def test_hostile_configurations_are_refused(raw: bytes) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        decode_config(raw, where="config.json")


def test_the_language_model_of_a_multimodal_one_is_described() -> None:
    inner = {**DENSE, "model_type": "llama"}
    raw = json.dumps({"model_type": "outer", "tie_word_embeddings": True, "text_config": inner})
    assert describe(decode_config(raw.encode(), where="test"), name="test").tied
