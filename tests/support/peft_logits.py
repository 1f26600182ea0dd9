"""A model with an adapter of PEFT's, and what PEFT computes with it, in a directory for tests that
run in another environment."""

from __future__ import annotations

from pathlib import Path

import peft
import safetensors.torch
import torch
import transformers

from deltawire.config import AdapterConfig
from deltawire.export.adapter import adapted
from deltawire.export.peft_directory import load_peft

VOCABULARY = 500
TARGETS = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
RANKS = {"embed_tokens": 2, "lm_head": 8}
ALPHAS = {"lm_head": 4.0}


def write_reference(folder: Path, *, tied: bool, prompts: int = 3, tokens: int = 6) -> None:
    """Write ``folder``: the model, the adapter as PEFT saves it, and ``expected.safetensors``: each
    prompt, the tokens that PEFT draws greedily after it, and the log-probabilities of all tokens
    at each of these places, float32[tokens, vocabulary].

    Embedding and head of a ``tied`` model share a weight, and each has its own adapter.
    """
    model = _base(tied)
    model.save_pretrained(folder / "model")
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS, rank_pattern=RANKS, alpha_pattern=ALPHAS,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(model, settings).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    theirs.save_pretrained(folder / "adapter")
    found = {}
    for number in range(prompts):
        prompt = torch.randint(VOCABULARY, (40 + 7 * number,), generator=generator)
        drawn, logprobs = _greedy(theirs, prompt, tokens)
        found |= {f"prompt.{number}": prompt, f"tokens.{number}": drawn}
        found[f"logprobs.{number}"] = logprobs
    if not tied:  # Trainers refuse an adapter of each of two layers that share a weight.
        _compare_embedded(folder / "adapter", found, prompts, tokens)
    safetensors.torch.save_file(found, folder / "expected.safetensors")


def _base(tied):
    config = transformers.Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=128, vocab_size=VOCABULARY, tie_word_embeddings=tied,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model.eval()


def _greedy(model, prompt, tokens):
    """The drawn tokens, and the log-probabilities at their places."""
    with torch.no_grad():
        for _ in range(tokens):
            logprobs = model(input_ids=prompt[None]).logits[0, -tokens:].log_softmax(-1)
            first, second = logprobs[-1].topk(2).values
            assert first - second > 1e-3, "a tie, which rounding may break in another way"
            prompt = torch.cat([prompt, logprobs[-1].argmax()[None]])
    return prompt[-tokens:].clone(), logprobs.contiguous()


def _compare_embedded(adapter, found, prompts, tokens):
    """The model of trainer and embedded engine computes the same, to the bit."""
    config = AdapterConfig(
        kind="lora", rank=4, alpha=6.0, targets=TARGETS, rank_pattern=RANKS, alpha_pattern=ALPHAS
    )
    ours = adapted(_base(False), config, seed=5)
    load_peft(ours, config, adapter)
    for number in range(prompts):
        drawn, logprobs = _greedy(ours.eval(), found[f"prompt.{number}"], tokens)
        assert torch.equal(drawn, found[f"tokens.{number}"])
        assert torch.equal(logprobs, found[f"logprobs.{number}"])
