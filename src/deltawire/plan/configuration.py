"""Decodes a model's config.json, which may come from anyone, into typed and bounded fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from deltawire.errors import InputError

MAX_BYTES = 4 << 20
"""Largest config.json that is read. Published ones stay below 100 KB."""

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
"""A width, a count of heads or a vocabulary."""
Few = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
"""A count that may be zero: layers of one kind, experts, a rank."""
LayerNames = Annotated[list[str], msgspec.Meta(max_length=4096)]
LayerNumbers = Annotated[list[int], msgspec.Meta(max_length=4096)]
Ratios = Annotated[dict[str, int], msgspec.Meta(max_length=64)]


class LinearAttention(msgspec.Struct, frozen=True):
    """The ``linear_attn_config`` table of Kimi Linear and Kimi K3; layers count from 1."""

    num_heads: Size
    head_dim: Size
    short_conv_kernel_size: Size = 4
    full_attn_layers: LayerNumbers = []
    use_full_rank_gate: bool = False


class ArchitectureConfig(msgspec.Struct, frozen=True):
    """The fields of config.json that decide a model's size. All others are ignored.

    Names are those of transformers. ``text_config`` holds the language model of a multimodal
    one; only that part is described.
    """

    model_type: Annotated[str, msgspec.Meta(max_length=64)] = ""
    text_config: ArchitectureConfig | None = None
    hidden_size: Size | None = None
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    vocab_size: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    use_qk_norm: bool = False
    qkv_bias: bool | None = None
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] | None = None
    num_experts: Few | None = None
    num_local_experts: Few | None = None
    n_routed_experts: Few | None = None
    num_experts_per_tok: Size | None = None
    num_experts_per_token: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Few | None = None
    n_shared_experts: Few | None = None
    num_shared_experts: Few | None = None
    first_k_dense_replace: Few | None = None
    mlp_only_layers: LayerNumbers | None = None
    decoder_sparse_step: Size = 1
    layer_types: LayerNames | None = None
    mlp_layer_types: LayerNames | None = None
    full_attention_interval: Size = 4
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Few | None = None
    qk_rope_head_dim: Few | None = None
    v_head_dim: Size | None = None
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: Size = 4
    index_n_heads: Size | None = None
    index_head_dim: Size | None = None
    index_topk_freq: Size = 1
    index_skip_topk_offset: Few = 2
    indexer_types: LayerNames | None = None
    o_groups: Size | None = None
    o_lora_rank: Size | None = None
    hc_mult: Size | None = None
    compress_ratios: LayerNumbers | None = None
    compress_rates: Ratios | None = None
    num_hash_layers: Few = 3
    linear_attn_config: LinearAttention | None = None
    routed_expert_hidden_size: Size | None = None
    mla_use_output_gate: bool = False
    attn_res_block_size: Few = 0


def decode_config(raw: bytes, *, where: str) -> ArchitectureConfig:
    """Decodes the bytes of a config.json and returns its language model's part.

    Raises `InputError`, naming ``where``, if the bytes are too many, no JSON object, or hold a
    field of the wrong type or beyond its bounds.
    """
    if len(raw) > MAX_BYTES:
        raise InputError(f"{where} has {len(raw):,} bytes; a config.json has at most {MAX_BYTES:,}")
    try:
        config = msgspec.json.decode(raw, type=ArchitectureConfig)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise InputError(
            f"{where} is not a usable config.json: {failure}",
            hint="pass the config.json of a Hugging Face model",
        ) from None
    if (inner := config.text_config) is not None:
        tied = inner.tie_word_embeddings
        if tied is None:
            tied = config.tie_word_embeddings
        model_type = inner.model_type or config.model_type
        return msgspec.structs.replace(inner, tie_word_embeddings=tied, model_type=model_type)
    return config


def read_config(path: Path) -> ArchitectureConfig:
    """Reads a config.json, or the one in a model directory.

    Raises `InputError` if there is none or it is not usable.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as failure:
        raise InputError(
            f"cannot read {file}: {failure.strerror or failure}",
            hint="pass a config.json, a model directory or a name that deltawire shapes lists",
        ) from None
    return decode_config(raw, where=str(file))
