"""How much router replay lowers the mismatch between a bf16 sampler and a float32 trainer.

    python examples/router_replay.py

Random mixtures of experts of three families, on the CPU in a minute or so: the sampler decodes in
bf16 over its cache, the trainer scores the same tokens in float32, once with its own choice of
experts and once with the sampler's. The weights are the same bits, drawn wide enough that experts
are different functions, as trained ones are. docs/PARITY.md has what it printed.
"""

from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig

from deltawire.export.models import serve_as
from deltawire.parity.comparison import compare
from deltawire.parity.scorers import parse_spec
from deltawire.parity.transformers_scorer import TransformersScorer
from deltawire.rl.evaluate.parity_sources import random_prompts

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
FAMILIES = {
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, num_experts=16, norm_topk_prob=True),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=16),
    "GLM-4-MoE": Glm4MoeConfig(
        **SIZES, n_routed_experts=16, n_group=4, topk_group=2, first_k_dense_replace=1
    ),
}


def build(config: Any) -> Any:
    """Random weights, rounded to what is published."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return serve_as(serve_as(model, "bfloat16"), "float32")


def main() -> None:
    """Compare each family, and print a row for it."""
    torch.set_num_threads(1)
    say = Console(highlight=False, width=100).print
    say("family      k3, own choice   replayed   times lower   largest gap   replayed   flipped")
    for name, config in FAMILIES.items():
        model = build(config)
        sampler = TransformersScorer(parse_spec("transformers:bf16:decode"), model)
        trainer = TransformersScorer(parse_spec("transformers:float32"), model)
        prompts = random_prompts(64, count=12, length=8, seed=0)
        found = compare(sampler, trainer, sampler.draw(prompts, count=40, seed=0), replay=True)
        own, replayed = found.divergence, found.replayed
        assert replayed is not None
        flipped = sum(found.flipped_M) / len(found.flipped_M)
        say(
            f"{name:<11} {own.k3:>14.2e} {replayed.k3:>10.2e} {own.k3 / replayed.k3:>13.1f}"
            f" {own.largest_gap:>13.3f} {replayed.largest_gap:>10.3f} {flipped:>9.2%}"
        )


if __name__ == "__main__":
    main()
