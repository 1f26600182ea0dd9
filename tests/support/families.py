"""Tiny models of the mixture-of-experts families that transformers has, made from configurations.

Each has eight experts or a few more, two of which are chosen."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltawire.export.models import _quiet

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
    # The families call the same thing by many names.
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT = {
    "head_dim": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
HYBRID = {"num_hidden_layers": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen2_moe": {},
    "mixtral": {},
    "olmoe": {},
    "flex_olmo": {},
    "gpt_oss": {},
    "deepseek_v2": {**LATENT, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**LATENT, **GROUPS},
    "deepseek_v32": {**LATENT, **GROUPS},
    "glm4_moe": GROUPS,
    "glm4_moe_lite": {**LATENT, **GROUPS},
    "dots1": GROUPS,
    "exaone_moe": GROUPS,
    "solar_open": GROUPS,
    "ernie4_5_moe": {},
    "hunyuan_v1_moe": {},
    "afmoe": {},
    "cohere2_moe": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "minimax_m2": {},
    "hy_v3": {},
    "laguna": {},
    "nemotron_h": {},
    "jamba": HYBRID,
    "qwen3_next": HYBRID,
    "qwen3_5_moe_text": HYBRID,
}
"""Those whose routers choose by one ``topk`` and return (logits, weights, indices)."""

OTHERS = ["jetmoe", "llama4_text", "phimoe"]
"""Those whose experts are chosen otherwise."""

QUICK = [
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "ernie4_5_moe",
    "granitemoe",
    "afmoe",
    "minimax_m2",
]
"""Those that every run of the tests tries; the others have the same kinds of routers."""

CACHED = [
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
    "ernie4_5_moe",
    "granitemoe",
]
"""Some whose layers keep only keys and values, so that the embedded engine samples from them."""


def build(name: str, *, seed: int = 0, **more: Any) -> Any:
    """A model with random weights, float32, in evaluation mode."""
    torch.manual_seed(seed)
    with _quiet():
        config = CONFIG_MAPPING[name](**{**SIZES, **FAMILIES.get(name, {}), **more})
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2, generator=generator)
    return model
