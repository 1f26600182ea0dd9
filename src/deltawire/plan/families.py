"""Builds the description of a model from its configuration, one function per family of layers.

A new family is one function and one line in ``FAMILIES``. Parameter counts are held equal to those
of transformers' own modules by a test, for every family that transformers has.

Example::

    model = describe(read_config(Path("config.json")), name="qwen3-8b")
    model.parameters, model.active_parameters
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from deltawire.errors import InputError
from deltawire.plan.architecture import Attention, DecoderLayer, FeedForward, Matrix, Model
from deltawire.plan.configuration import ArchitectureConfig


def describe(config: ArchitectureConfig, *, name: str) -> Model:
    """Describes the model of a configuration.

    Raises `InputError` for an unknown family, and for missing or contradictory fields.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise InputError(
            f"{name}: unknown model type {config.model_type!r}",
            hint=f"known: {', '.join(sorted(FAMILIES))}",
        )
    fields = _Fields(config, name)
    hidden, vocabulary = fields.need("hidden_size"), fields.need("vocab_size")
    known: dict[DecoderLayer, DecoderLayer] = {}
    built = (family(fields, index) for index in range(fields.need("num_hidden_layers")))
    layers = tuple(known.setdefault(layer, layer) for layer in built)
    tied = config.tie_word_embeddings
    outside = hidden
    if config.hc_mult is not None and config.model_type == "deepseek_v4":
        outside += config.hc_mult * config.hc_mult * hidden + config.hc_mult + 1
    if config.attn_res_block_size:
        outside += 2 * hidden
    return Model(
        name=name,
        family=config.model_type,
        hidden=hidden,
        vocabulary=vocabulary,
        tied=bool(tied),
        layers=layers,
        outside=outside,
        context=config.max_position_embeddings or 0,
    )


class _Fields:
    """Fields of a configuration, with an error that names the one that is missing."""

    def __init__(self, config: ArchitectureConfig, name: str) -> None:
        self.config = config
        self.name = name

    def need(self, *names: str) -> int:
        for name in names:
            value = getattr(self.config, name)
            if value is not None:
                return int(value)
        raise InputError(f"{self.name}: config.json of {self.config.model_type} lacks {names[0]}")

    def kind(self, names: list[str] | None, index: int, of: str) -> str:
        if names is None:
            return ""
        if index >= len(names):
            raise InputError(f"{self.name}: {of} names {len(names)} layers; there are more")
        return names[index]

    @property
    def hidden(self) -> int:
        return self.need("hidden_size")

    def heads(self) -> tuple[int, int, int]:
        """Query heads, key-value heads and a head's width."""
        heads = self.need("num_attention_heads")
        pairs = self.config.num_key_value_heads or heads
        if heads % pairs:
            raise InputError(f"{self.name}: {heads} heads cannot share {pairs} key-value heads")
        return heads, pairs, self.config.head_dim or self.hidden // heads


def _grouped(
    fields: _Fields,
    *,
    norm: Literal["", "head", "full"] = "",
    bias: Literal["", "qkv", "all"] = "",
    sinks: bool = False,
    gate: bool = False,
) -> tuple[list[Matrix], int, Attention]:
    """Grouped-query attention: matrices, other parameters and activation widths."""
    hidden = fields.hidden
    heads, pairs, width = fields.heads()
    queries, keys = heads * width, pairs * width
    twice = 2 if gate else 1
    biased = bias in {"qkv", "all"}
    matrices = [
        Matrix("attention", hidden, queries * twice, bias=queries * twice * biased),
        Matrix("attention", hidden, keys, bias=keys * biased),
        Matrix("attention", hidden, keys, bias=keys * biased),
        Matrix("attention", queries, hidden, bias=hidden * (bias == "all"), columns=True),
    ]
    others = {"": 0, "head": 2 * width, "full": queries + keys}[norm] + heads * sinks
    attention = Attention(
        "grouped", heads, queries, keys, keys, queries, normed=norm != "", gated=gate
    )
    return matrices, others, attention


def _latent(fields: _Fields) -> tuple[list[Matrix], int, Attention]:
    """Multi-head latent attention of DeepSeek-V2 and its successors."""
    config, hidden = fields.config, fields.hidden
    heads = fields.need("num_attention_heads")
    rope, plain = fields.need("qk_rope_head_dim"), fields.need("qk_nope_head_dim")
    rank, value = fields.need("kv_lora_rank"), fields.need("v_head_dim")
    queries = heads * (rope + plain)
    biased = bool(config.attention_bias)
    matrices, others = [], rank
    if config.q_lora_rank is None:
        matrices.append(Matrix("attention", hidden, queries))
    else:
        low = config.q_lora_rank
        matrices += [
            Matrix("attention", hidden, low, bias=low * biased),
            Matrix("attention", low, queries),
        ]
        others += low
    matrices += [
        Matrix("attention", hidden, rank + rope, bias=(rank + rope) * biased),
        Matrix("attention", rank, heads * (plain + value)),
        Matrix("attention", heads * value, hidden, bias=hidden * biased, columns=True),
    ]
    attention = Attention(
        "latent",
        heads,
        queries,
        queries,
        heads * value,
        heads * value,
        query_rank=config.q_lora_rank or 0,
        key_value_rank=rank,
    )
    return matrices, others, attention


def _dense(
    fields: _Fields, intermediate: int, *, bias: bool = False
) -> tuple[list[Matrix], FeedForward]:
    """Returns a gated MLP: gate, up and down."""
    hidden = fields.hidden
    return [
        Matrix("dense_mlp", hidden, intermediate, copies=2, bias=intermediate * bias),
        Matrix("dense_mlp", intermediate, hidden, bias=hidden * bias, columns=True),
    ], FeedForward(intermediate=intermediate)


def _experts(
    fields: _Fields,
    *,
    intermediate: int,
    shared: int = 0,
    bias: bool = False,
    shared_gate: bool = False,
    scores_fp32: bool = False,
) -> tuple[list[Matrix], FeedForward]:
    """Routed experts, with a router and, where there are any, shared experts."""
    hidden = fields.hidden
    inner = fields.config.routed_expert_hidden_size or hidden
    count = fields.need("n_routed_experts", "num_experts", "num_local_experts")
    chosen = fields.need("num_experts_per_tok", "num_experts_per_token")
    if not 1 <= chosen <= count:
        raise InputError(f"{fields.name}: {chosen} experts per token of {count}")
    matrices = [
        Matrix("router", hidden, count, bias=count * bias, adaptable=False),
        Matrix("experts", inner, 2 * intermediate, copies=count, bias=2 * intermediate * bias),
        Matrix("experts", intermediate, inner, count, bias=inner * bias, columns=True),
    ]
    if inner != hidden:
        matrices += [Matrix("attention", hidden, inner), Matrix("attention", inner, hidden)]
    if shared:
        matrices += [
            Matrix("shared_experts", hidden, shared, copies=2),
            Matrix("shared_experts", shared, hidden, columns=True),
        ]
    if shared_gate:
        matrices.append(Matrix("shared_experts", hidden, 1, adaptable=False))
    return matrices, FeedForward(
        experts=count,
        chosen=chosen,
        expert_intermediate=intermediate,
        expert_hidden=inner,
        shared_intermediate=shared,
        scores_fp32=scores_fp32,
    )


def _layer(
    attention: tuple[list[Matrix], int, Attention],
    feed_forward: tuple[list[Matrix], FeedForward],
    others: int,
    *,
    streams: int = 1,
) -> DecoderLayer:
    matrices, small, widths = attention
    inner, shape = feed_forward
    return DecoderLayer(tuple(matrices + inner), others + small, widths, shape, streams)


def _llama(fields: _Fields, _: int) -> DecoderLayer:
    config = fields.config
    attention = _grouped(fields, bias="all" if config.attention_bias else "")
    dense = _dense(fields, fields.need("intermediate_size"), bias=config.mlp_bias)
    return _layer(attention, dense, 2 * fields.hidden)


def _qwen2(fields: _Fields, _: int) -> DecoderLayer:
    dense = _dense(fields, fields.need("intermediate_size"))
    return _layer(_grouped(fields, bias="qkv"), dense, 2 * fields.hidden)


def _qwen3(fields: _Fields, _: int) -> DecoderLayer:
    bias: Literal["", "all"] = "all" if fields.config.attention_bias else ""
    dense = _dense(fields, fields.need("intermediate_size"))
    return _layer(_grouped(fields, norm="head", bias=bias), dense, 2 * fields.hidden)


def _qwen3_moe(fields: _Fields, index: int) -> DecoderLayer:
    config = fields.config
    bias: Literal["", "all"] = "all" if config.attention_bias else ""
    routed = index not in (config.mlp_only_layers or ()) and (
        (index + 1) % config.decoder_sparse_step == 0
    )
    if routed:
        block = _experts(fields, intermediate=fields.need("moe_intermediate_size"))
    else:
        block = _dense(fields, fields.need("intermediate_size"))
    return _layer(_grouped(fields, norm="head", bias=bias), block, 2 * fields.hidden)


def _olmoe(fields: _Fields, _: int) -> DecoderLayer:
    bias: Literal["", "all"] = "all" if fields.config.attention_bias else ""
    block = _experts(fields, intermediate=fields.need("intermediate_size"))
    return _layer(_grouped(fields, norm="full", bias=bias), block, 2 * fields.hidden)


def _mixtral(fields: _Fields, _: int) -> DecoderLayer:
    block = _experts(fields, intermediate=fields.need("intermediate_size"))
    return _layer(_grouped(fields), block, 2 * fields.hidden)


def _gpt_oss(fields: _Fields, _: int) -> DecoderLayer:
    block = _experts(fields, intermediate=fields.need("intermediate_size"), bias=True)
    biased = fields.config.attention_bias is not False
    attention = _grouped(fields, bias="all" if biased else "", sinks=True)
    return _layer(attention, block, 2 * fields.hidden)


def _deepseek_v3(fields: _Fields, index: int) -> DecoderLayer:
    if index < (fields.config.first_k_dense_replace or 0):
        block = _dense(fields, fields.need("intermediate_size"))
    else:
        intermediate = fields.need("moe_intermediate_size")
        shared = intermediate * fields.need("n_shared_experts")
        block = _experts(fields, intermediate=intermediate, shared=shared, scores_fp32=True)
    return _layer(_latent(fields), block, 2 * fields.hidden)


def _glm4_moe(fields: _Fields, index: int) -> DecoderLayer:
    config = fields.config
    attention = _grouped(
        fields,
        norm="head" if config.use_qk_norm else "",
        bias="qkv" if config.attention_bias else "",
    )
    if index < (config.first_k_dense_replace or 0):
        block = _dense(fields, fields.need("intermediate_size"))
    else:
        intermediate = fields.need("moe_intermediate_size")
        shared = intermediate * fields.need("n_shared_experts")
        block = _experts(fields, intermediate=intermediate, shared=shared, scores_fp32=True)
    return _layer(attention, block, 2 * fields.hidden)


def _glm_dsa(fields: _Fields, index: int) -> DecoderLayer:
    """GLM-5: latent attention, and an indexer that shares its choice over layers."""
    config = fields.config
    layer = _deepseek_v3(fields, index)
    if fields.kind(config.indexer_types, index, "indexer_types") == "shared":
        return layer
    due = max(index - config.index_skip_topk_offset + 1, 0) % config.index_topk_freq == 0
    if config.indexer_types is None and not due:
        return layer
    heads, width = fields.need("index_n_heads"), fields.need("index_head_dim")
    indexer = (
        Matrix("attention", fields.need("q_lora_rank"), heads * width, adaptable=False),
        Matrix("attention", fields.hidden, width, adaptable=False),
        Matrix("attention", fields.hidden, heads, adaptable=False),
    )
    return DecoderLayer(
        layer.matrices + indexer, layer.others + 2 * width, layer.attention, layer.feed_forward
    )


def _delta_net(fields: _Fields) -> tuple[list[Matrix], int, Attention]:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5."""
    hidden, config = fields.hidden, fields.config
    key_heads, value_heads = (
        fields.need("linear_num_key_heads"),
        fields.need("linear_num_value_heads"),
    )
    key_width, value_width = (
        fields.need("linear_key_head_dim"),
        fields.need("linear_value_head_dim"),
    )
    keys, values = key_heads * key_width, value_heads * value_width
    mixed = 2 * keys + values
    matrices = [
        Matrix("attention", hidden, mixed),
        Matrix("attention", hidden, values),
        Matrix("attention", hidden, value_heads, copies=2),
        Matrix("attention", values, hidden, columns=True),
    ]
    others = mixed * config.linear_conv_kernel_dim + 2 * value_heads + value_width
    state = value_heads * key_width * value_width
    attention = Attention("linear", value_heads, keys, keys, values, values, state=state)
    return matrices, others, attention


def _qwen3_5(fields: _Fields, index: int) -> DecoderLayer:
    config = fields.config
    kind = fields.kind(config.layer_types, index, "layer_types")
    linear = (
        kind == "linear_attention" if kind else (index + 1) % config.full_attention_interval != 0
    )
    bias: Literal["", "all"] = "all" if config.attention_bias else ""
    attention = (
        _delta_net(fields) if linear else _grouped(fields, norm="head", bias=bias, gate=True)
    )
    if config.num_experts:
        block = _experts(
            fields,
            intermediate=fields.need("moe_intermediate_size"),
            shared=fields.need("shared_expert_intermediate_size"),
            shared_gate=True,
        )
    else:
        block = _dense(fields, fields.need("intermediate_size"))
    return _layer(attention, block, 2 * fields.hidden)


def _deepseek_v4(fields: _Fields, index: int) -> DecoderLayer:
    """Compressed attention with one key-value head, and hyper-connections."""
    hidden = fields.hidden
    heads, _, width = fields.heads()
    low, groups, out = (
        fields.need("q_lora_rank"),
        fields.need("o_groups"),
        fields.need("o_lora_rank"),
    )
    streams = fields.need("hc_mult")
    matrices = [
        Matrix("attention", hidden, low),
        Matrix("attention", low, heads * width),
        Matrix("attention", hidden, width),
        Matrix("attention", heads * width // groups, groups * out),
        Matrix("attention", groups * out, hidden, columns=True),
    ]
    others = low + width + heads
    rate = _compression(fields, index)
    if rate:
        several = 2 if rate <= _SPARSE_RATE else 1
        matrices.append(Matrix("attention", hidden, several * width, copies=2, adaptable=False))
        others += rate * several * width + width
        if several == 2:
            index_heads, small = fields.need("index_n_heads"), fields.need("index_head_dim")
            matrices += [
                Matrix("attention", hidden, 2 * small, copies=2, adaptable=False),
                Matrix("attention", low, index_heads * small, adaptable=False),
                Matrix("attention", hidden, index_heads, adaptable=False),
            ]
            others += rate * 2 * small + small
    mixing = (2 + streams) * streams
    others += 2 * (mixing * streams * hidden + mixing + 3) + 2 * hidden
    intermediate = fields.need("moe_intermediate_size")
    shared = intermediate * fields.need("n_shared_experts")
    block = _experts(fields, intermediate=intermediate, shared=shared, scores_fp32=True)
    attention = Attention(
        "compressed", heads, heads * width, width, width, groups * out, query_rank=low
    )
    return _layer((matrices, others, attention), block, 0, streams=streams)


_SPARSE_RATE = 16
"""Compression by up to this rate keeps an indexer (DeepSeek-V4: 4 with, 128 without)."""


def _compression(fields: _Fields, index: int) -> int:
    """Tokens per compressed entry in a layer of DeepSeek-V4, 0 for a sliding window only."""
    config = fields.config
    rates = config.compress_rates or {}
    sparse = rates.get("compressed_sparse_attention", 4)
    heavy = rates.get("heavily_compressed_attention", 128)
    kind = fields.kind(config.layer_types, index, "layer_types")
    if kind:
        return {"compressed_sparse_attention": sparse, "heavily_compressed_attention": heavy}.get(
            kind, 0
        )
    if config.compress_ratios is not None:
        if index >= len(config.compress_ratios):
            raise InputError(f"{fields.name}: compress_ratios names fewer layers than there are")
        return config.compress_ratios[index]
    return heavy if index < 2 or index % 2 == 0 else sparse


def _kimi_linear(fields: _Fields, index: int) -> DecoderLayer:
    """Kimi Linear and K3: delta attention, with a full attention layer every few layers."""
    config, hidden = fields.config, fields.hidden
    linear = config.linear_attn_config
    if linear is None:
        raise InputError(
            f"{fields.name}: config.json of {config.model_type} lacks linear_attn_config"
        )
    if index + 1 in linear.full_attn_layers:
        matrices, small, attention = _latent(fields)
        if config.mla_use_output_gate:
            matrices.append(Matrix("attention", hidden, attention.outputs))
    else:
        heads, width = linear.num_heads, linear.head_dim
        full = heads * width
        matrices = [
            Matrix("attention", hidden, full, copies=3),
            Matrix("attention", hidden, width),
            Matrix("attention", width, full),
            Matrix("attention", hidden, heads),
            Matrix("attention", full, hidden),
        ]
        if linear.use_full_rank_gate:
            matrices.append(Matrix("attention", hidden, full))
        else:
            matrices += [Matrix("attention", hidden, width), Matrix("attention", width, full)]
        decay = width if linear.use_full_rank_gate else heads
        small = 3 * full * linear.short_conv_kernel_size + full + decay + width
        attention = Attention("linear", heads, full, full, full, full, state=full * width)
    others = 2 * hidden
    if config.attn_res_block_size:
        others += 4 * hidden
    if index < (config.first_k_dense_replace or 0):
        block = _dense(fields, fields.need("intermediate_size"))
    else:
        intermediate = fields.need("moe_intermediate_size")
        shared = intermediate * fields.need("num_shared_experts", "n_shared_experts")
        block = _experts(fields, intermediate=intermediate, shared=shared, scores_fp32=True)
        if config.routed_expert_hidden_size:
            others += config.routed_expert_hidden_size
    return _layer((matrices, small, attention), block, others)


FAMILIES: dict[str, Callable[[_Fields, int], DecoderLayer]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": _glm_dsa,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "deepseek_v4": _deepseek_v4,
    "kimi_linear": _kimi_linear,
}
"""How one layer of each ``model_type`` is built, by its index from 0."""
