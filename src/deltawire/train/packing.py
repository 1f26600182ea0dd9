"""Lays trajectories out as one row of tokens without padding, and computes its attention.

A row is a sequence of blocks. The tokens of a block attend to each other, causally, and to a prefix
elsewhere in the row: a prompt that several completions share is computed once, as a block without a
prefix, and each completion is a block after it. Every other layer of a model sees one long row.

Attention over blocks is computed in buckets: blocks of similar sizes are padded to one size and go
through one call, so that many short answers take one call and long ones need no padding. Both
decisions, sharing and buckets, are pure functions of lengths.

On a GPU in half precision, torch's variable-length flash attention computes all blocks in one call.

Shapes: T tokens of the row, N trajectories; a bucket has B blocks of Q queries and K keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

PACKED = "deltawire_packed"
"""The name under which transformers finds `attend`."""
VARLEN = frozenset(inspect.signature(varlen_attn).parameters)
"""Parameters of this torch's variable-length attention: torch 2.10 has it, ``scale`` and
``window_size`` came with 2.11, ``enable_gqa`` with 2.12."""
PAIRS_PER_TOKEN = 6144
"""Pairs of query and key that cost as much as a token's other arithmetic: 6 · hidden, from 24 ·
hidden² operations for a token and layer against 4 · hidden for a pair, at a hidden size of 1024."""
PAIRS_PER_CALL = 4096
"""Pairs that cost as much as one more call of attention, on a CPU."""


class Block(NamedTuple):
    """Tokens ``start`` to ``start + tokens`` of the row, which also attend to ``prefix_tokens``
    tokens from ``prefix`` on."""

    start: int
    tokens: int
    prefix: int = 0
    prefix_tokens: int = 0

    @property
    def keys(self) -> int:
        """Tokens that its last token attends to."""
        return self.prefix_tokens + self.tokens


def shares_prompt(prompt: int, completions: Sequence[int]) -> bool:
    """Returns whether completions of these lengths are cheaper after one computation of their
    prompt than each after its own.

    Sharing saves the prompt's tokens. It costs pairs: with a prefix, attention is masked rather
    than causal, which computes every pair of a block instead of half.
    """
    if len(completions) < 2:
        return False
    shared, separate = (cost_of(prompt, completions, shared=shared) for shared in (True, False))
    return shared < separate


def cost_of(prompt: int, completions: Sequence[int], *, shared: bool) -> float:
    """Returns the cost of a prompt and its completions, in tokens. The last token is never an
    input.
    """
    rest = [count - 1 for count in completions]
    if shared:
        tokens = prompt + sum(rest)
        pairs = prompt**2 / 2 + sum(count * (prompt + count) for count in rest)
    else:
        tokens = sum(prompt + count for count in rest)
        pairs = sum((prompt + count) ** 2 for count in rest) / 2
    return tokens + pairs / PAIRS_PER_TOKEN


def tokens_of(prompt: int, completions: Sequence[int]) -> int:
    """Returns the number of tokens that a prompt and its completions take in a row."""
    copies = 1 if shares_prompt(prompt, completions) else len(completions)
    return copies * prompt + sum(completions) - len(completions)


@dataclass(frozen=True)
class AttentionBucket:
    """Blocks that one call computes. ``queries_BQ`` and ``keys_BK`` are positions in the row, 0
    where a block has none; a prefix ends, and a block's own keys begin, at the key ``own``.

    ``starts_B`` is each block's first key, which padding precedes.
    """

    queries_BQ: Tensor
    keys_BK: Tensor
    starts_B: Tensor
    own: int
    contiguous: int
    """The first position, if queries and keys are one range of the row; else -1."""
    _masks: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def mask(self, window: int) -> Tensor | None:
        """Returns the keys that a query attends to, bool[B, 1, Q, K]; None for an ordinary causal
        mask.

        ``window`` is the number of tokens, itself included, that a query reaches back; 0 for all.
        """
        size_q, size_k = self.queries_BQ.shape[1], self.keys_BK.shape[1]
        if self.own == 0 and (not window or size_k <= window):
            return None
        if window not in self._masks:
            device = self.queries_BQ.device
            ends_Q = self.own + torch.arange(size_q, device=device)
            keys_K = torch.arange(size_k, device=device)
            mask = (keys_K <= ends_Q[:, None])[None] & (keys_K >= self.starts_B[:, None, None])
            if window:
                mask &= keys_K > ends_Q[:, None] - window
            # A padding query reaches past the block's keys; its result is finite and is dropped.
            self._masks[window] = mask[:, None]
        return self._masks[window]


@dataclass(frozen=True)
class Packing:
    """The attention of a row: what `attend` needs, on the model's device.

    ``order_T`` is each position's place among the buckets' queries, one after another; None if
    they are in order. ``keys_K`` are the positions of all blocks' keys, one block after another;
    ``query_ends`` and ``key_ends`` are where each block ends, after a 0, int32.
    """

    buckets: tuple[AttentionBucket, ...]
    order_T: Tensor | None
    keys_K: Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest: tuple[int, int]


class PackingProbe:
    """Stands in for a `Packing`: records the windows of the calls, and computes no attention."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def record(self, query: Tensor, value: Tensor, window: int | None) -> Tensor:
        """Notes a call; returns zeros of the result's shape."""
        self.windows.append(window)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def pack(blocks: Sequence[Block], device: torch.device | str = "cpu") -> Packing:
    """Plans the attention of a row of blocks, which cover it in order."""
    groups = [sorted(group) for group in bucketed([(b.tokens, b.prefix_tokens) for b in blocks])]
    buckets = tuple(_bucket([blocks[n] for n in group], device) for group in groups)
    places = torch.empty(sum(block.tokens for block in blocks), dtype=torch.long)
    offset = 0
    for group, bucket in zip(groups, buckets, strict=True):
        width = bucket.queries_BQ.shape[1]
        for row, number in enumerate(group):
            block = blocks[number]
            first = offset + row * width
            places[block.start : block.start + block.tokens] = torch.arange(
                first, first + block.tokens
            )
        offset += bucket.queries_BQ.numel()
    in_order = offset == len(places) and bool((places == torch.arange(offset)).all())
    counts = torch.tensor([[block.tokens, block.keys] for block in blocks])
    ends = F.pad(counts.cumsum(0), (0, 0, 1, 0)).to(torch.int32).to(device)
    keys = torch.cat([_keys(block) for block in blocks])
    return Packing(
        buckets,
        None if in_order else places.to(device),
        keys.to(device),
        ends[:, 0].contiguous(),
        ends[:, 1].contiguous(),
        (int(counts[:, 0].max()), int(counts[:, 1].max())),
    )


def bucketed(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Divides blocks of (own, prefix) tokens into buckets; returns their numbers.

    Blocks with a prefix are kept from those without, which need no mask. Largest first, a block
    joins the last bucket while the padding of all its blocks costs less than one more call.
    """
    order = sorted(range(len(sizes)), key=lambda n: (sizes[n][1] > 0, sizes[n], -n), reverse=True)
    buckets: list[list[int]] = []
    waste, width = 0, (0, 0)
    for number in order:
        own, prefix = sizes[number]
        if buckets and (prefix > 0) == (width[1] > 0):
            grown = (width[0], max(width[1], prefix))
            members = [sizes[n] for n in buckets[-1]]
            waste = sum(_padding(one, grown) for one in [*members, sizes[number]])
            if waste <= PAIRS_PER_CALL:
                buckets[-1].append(number)
                width = grown
                continue
        buckets.append([number])
        width = (own, prefix)
    return buckets


def _padding(size: tuple[int, int], padded: tuple[int, int]) -> int:
    return padded[0] * sum(padded) - size[0] * sum(size)


def _keys(block: Block) -> Tensor:
    return torch.cat(
        [
            torch.arange(block.prefix, block.prefix + block.prefix_tokens),
            torch.arange(block.start, block.start + block.tokens),
        ]
    )


def _bucket(blocks: Sequence[Block], device: torch.device | str) -> AttentionBucket:
    width = max(block.tokens for block in blocks)
    own = max(block.prefix_tokens for block in blocks)
    queries = torch.zeros(len(blocks), width, dtype=torch.long)
    keys = torch.zeros(len(blocks), own + width, dtype=torch.long)
    for row, block in enumerate(blocks):
        queries[row, : block.tokens] = torch.arange(block.start, block.start + block.tokens)
        start = own - block.prefix_tokens
        keys[row, start : start + block.keys] = _keys(block)
    first = blocks[0].start
    whole = own == 0 and all(
        block.tokens == width and block.start == first + row * width
        for row, block in enumerate(blocks)
    )
    starts = torch.tensor([own - block.prefix_tokens for block in blocks])
    return AttentionBucket(
        queries.to(device), keys.to(device), starts.to(device), own, first if whole else -1
    )


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packing: Packing | PackingProbe | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, in the form that transformers calls: query, key and value are
    [1, heads, T, size], the result is [1, T, heads, size].

    Raises `ValueError` for a call that carries no packing or has a mask.
    """
    if packing is None or attention_mask is not None or len(query) != 1:
        raise ValueError("packed attention was called without a packing, or with a mask")
    del module
    if isinstance(packing, PackingProbe):
        return packing.record(query, value, sliding_window), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    plain = s_aux is None and softcap is None
    window = sliding_window or 0
    if plain and not dropout and takes_varlen(query, value):
        return _varlen(q, k, v, packing, scaling, window), None
    parts = []
    for bucket in packing.buckets:
        q_B, k_B, v_B = _gathered(q, k, v, bucket)
        mask = bucket.mask(window)
        if plain:
            out = F.scaled_dot_product_attention(
                q_B, k_B, v_B, mask, dropout, is_causal=mask is None, scale=scaling
            )
        else:
            out = _eager(q_B, k_B, v_B, mask, scaling, dropout, softcap, s_aux)
        parts.append(out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3]))
    out_T = parts[0] if len(parts) == 1 else torch.cat(parts)
    if packing.order_T is not None:
        out_T = torch.index_select(out_T, 0, packing.order_T)
    return out_T[None], None


AttentionInterface.register(PACKED, attend)


def takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Returns whether torch's variable-length flash attention computes these tensors."""
    half = query.dtype in {torch.bfloat16, torch.float16}
    able = {"scale", "window_size"} <= VARLEN
    return able and query.is_cuda and half and query.shape[-1] == value.shape[-1]


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int
) -> Tensor:
    """All blocks in one call; a block's last query meets its last key."""
    if len(packing.keys_K) != len(k) or packing.longest[0] != packing.longest[1]:
        k, v = (torch.index_select(x, 0, packing.keys_K) for x in (k, v))
    grouped = q.shape[1] // k.shape[1]
    options: dict[str, Any] = {"enable_gqa": True} if grouped > 1 and "enable_gqa" in VARLEN else {}
    if grouped > 1 and not options:
        k, v = (x.repeat_interleave(grouped, dim=1) for x in (k, v))
    out: Any = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        packing.query_ends,
        packing.key_ends,
        *packing.longest,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        **options,
    )
    result: Tensor = out[None]
    return result


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, bucket: AttentionBucket
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a bucket's queries, keys and values: [B, heads, Q or K, size], keys repeated for
    grouped queries.
    """
    shape_q, shape_k = bucket.queries_BQ.shape, bucket.keys_BK.shape
    if bucket.contiguous >= 0:
        rows = slice(bucket.contiguous, bucket.contiguous + bucket.queries_BQ.numel())
        q, k, v = q[rows], k[rows], v[rows]
    else:
        # The backward pass of index_select adds gradients of equal rows in order; that of
        # indexing adds them in the order in which threads arrive.
        q = torch.index_select(q, 0, bucket.queries_BQ.reshape(-1))
        k, v = (torch.index_select(x, 0, bucket.keys_BK.reshape(-1)) for x in (k, v))
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    q = q.reshape(*shape_q, *q.shape[1:])
    k, v = (x.reshape(*shape_k, *x.shape[1:]) for x in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores (Gemma 2) or attention sinks (gpt-oss), as transformers' eager
    forms compute them."""
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sunk = sinks.reshape(1, -1, 1, 1).expand(len(q), -1, q.shape[2], -1).to(scores.dtype)
        scores = torch.cat([scores, sunk], dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, p=dropout) @ v
