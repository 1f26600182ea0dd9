"""Builds small models with random weights, and the byte-level tokenizer that they use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from deltawire.config import BuildConfig
from deltawire.errors import InputError

END, PAD = "<|end|>", "<|pad|>"
BYTES = 256


def byte_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte, whose id is the byte's value, and two more for
    the end and for padding.

    It is saved as an ordinary ``tokenizer.json``, which any Hugging Face program reads.
    """
    alphabet = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def _byte_characters() -> list[str]:
    """Returns the printable character that byte-level tokenizers use for each byte: printable
    Latin-1 characters represent themselves, the others are mapped to code points from 256 on.
    """
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in own else chr(next(spare)) for byte in range(BYTES)]


def build_model(config: BuildConfig, *, seed: int) -> Any:
    """Builds a causal LM with random float32 weights, which are a function of ``seed``.

    Raises `InputError` if the sizes contradict each other.
    """
    if config.hidden_size % config.head_size:
        raise InputError(
            f"model.build.hidden_size {config.hidden_size} is not a multiple of "
            f"head_size {config.head_size}"
        )
    if config.family == "qwen3_moe" and config.experts_per_token > config.experts:
        raise InputError(
            f"model.build.experts_per_token {config.experts_per_token} exceeds "
            f"experts {config.experts}"
        )
    settings = {
        **config.architecture(),
        "eos_token_id": BYTES,
        "pad_token_id": BYTES + 1,
        "bos_token_id": None,
    }
    settings.pop("model_type")
    torch.manual_seed(seed)
    if config.family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**settings))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, norm_topk_prob=True))


def is_built(path: Path) -> bool:
    """Returns whether ``path`` holds a complete model directory."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
