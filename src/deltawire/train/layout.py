"""Arranges a batch's tokens as the inputs of one forward pass: packed, or one padded row for each
trajectory.

The last token of a trajectory is never an input, because no token after it is predicted.

Shapes: R rows of S tokens, flat positions r · S + s; N trajectories of C tokens; W tokens whose
log-probabilities are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltawire.train.batch import TokenBatch
from deltawire.train.packing import Block, Packing, pack, shares_prompt


@dataclass(frozen=True)
class BatchLayout:
    """The inputs of one forward pass, and the positions of tokens in them.

    ``packing`` is the attention of a packed row; without it, ``mask_RS`` is 0 where a row is
    padded. ``starts_N`` are the flat positions of each trajectory's prompt and of its first token.
    ``reads_W`` are the flat positions whose hidden states predict the wanted tokens, and
    ``places_W`` those tokens' places among all, n · C + c.
    """

    ids_RS: Tensor
    positions_RS: Tensor
    mask_RS: Tensor | None
    packing: Packing | None
    starts_N: list[tuple[int, int]]
    reads_W: Tensor
    places_W: Tensor


def lay_out(batch: TokenBatch, *, packed: bool) -> BatchLayout:
    """Arranges a batch; tensors are on the batch's device."""
    prompts_N = batch.prompts_N.tolist()
    lengths_G = batch.prompt_mask_GP.sum(1).tolist()
    counts_N = batch.token_mask_NC.sum(1).tolist()
    device = batch.tokens_NC.device
    if packed:
        starts, blocks = _blocks(prompts_N, lengths_G, counts_N)
        size = blocks[-1].start + blocks[-1].tokens
        rows, packing = 1, pack(blocks, device)
    else:
        size = max(lengths_G[g] + count - 1 for g, count in zip(prompts_N, counts_N, strict=True))
        starts = [(n * size, n * size + lengths_G[g]) for n, g in enumerate(prompts_N)]
        rows, packing = len(starts), None
    ids = torch.zeros(rows * size, dtype=torch.long, device=device)
    positions = torch.zeros(rows * size, dtype=torch.long, device=device)
    mask = torch.zeros(rows * size, dtype=torch.long, device=device)
    width = batch.prompt_mask_GP.shape[1]
    written: set[int] = set()
    for n, (prompt, first) in enumerate(starts):
        length, rest = lengths_G[prompts_N[n]], counts_N[n] - 1
        if prompt not in written:
            written.add(prompt)
            ids[prompt : prompt + length] = batch.prompts_GP[prompts_N[n], width - length :]
            positions[prompt : prompt + length] = torch.arange(length, device=device)
            mask[prompt : prompt + length] = 1
        ids[first : first + rest] = batch.tokens_NC[n, :rest]
        positions[first : first + rest] = torch.arange(length, length + rest, device=device)
        mask[first : first + rest] = 1
    rows_W, columns_W = batch.wanted.nonzero(as_tuple=True)
    last_N = torch.tensor([starts[n][0] + lengths_G[g] - 1 for n, g in enumerate(prompts_N)])
    first_N = torch.tensor([first for _, first in starts])
    last_N, first_N = last_N.to(device), first_N.to(device)
    return BatchLayout(
        ids.view(rows, size),
        positions.view(rows, size),
        None if packed else mask.view(rows, size),
        packing,
        starts,
        torch.where(columns_W == 0, last_N[rows_W], first_N[rows_W] + columns_W - 1),
        rows_W * batch.tokens_NC.shape[1] + columns_W,
    )


def lay_out_sequences(
    sequences: Sequence[Tensor],
    targets: Sequence[Tensor],
    device: torch.device,
    *,
    packed: bool,
) -> BatchLayout:
    """Arranges whole sequences, int64[L] each: one packed row, or a row for each.

    Every position predicts its targets, int64[L] or int64[L, K].
    """
    lengths = [len(one) for one in sequences]
    width = sum(lengths) if packed else max(lengths)
    rows = 1 if packed else len(lengths)
    ids = torch.zeros(rows * width, dtype=torch.long)
    positions, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    starts, reads, start = list[int](), [], 0
    for number, (tokens, wanted) in enumerate(zip(sequences, targets, strict=True)):
        start = start if packed else number * width
        starts.append(start)
        count = len(tokens)
        ids[start : start + count] = tokens
        positions[start : start + count] = torch.arange(count)
        mask[start : start + count] = 1
        columns = wanted[0].numel() if wanted.dim() > 1 else 1
        reads.append(torch.arange(start, start + count).repeat_interleave(columns))
        start += count
    blocks = [Block(first, count) for first, count in zip(starts, lengths, strict=True)]
    reads_W = torch.cat(reads).to(device)
    return BatchLayout(
        ids.view(rows, width).to(device),
        positions.view(rows, width).to(device),
        None if packed else mask.view(rows, width).to(device),
        pack(blocks, device) if packed else None,
        [(first, first) for first in starts],
        reads_W,
        torch.arange(len(reads_W), device=device),
    )


def _blocks(
    prompts_N: list[int], lengths_G: list[int], counts_N: list[int]
) -> tuple[list[tuple[int, int]], list[Block]]:
    """Each trajectory's places in a packed row, and the row's blocks: prompt after prompt, each
    with its trajectories."""
    starts = [(0, 0)] * len(prompts_N)
    blocks: list[Block] = []
    size = 0
    members: dict[int, list[int]] = {}
    for n, prompt in enumerate(prompts_N):
        members.setdefault(prompt, []).append(n)
    for prompt, rows in members.items():
        length = lengths_G[prompt]
        if not shares_prompt(length, [counts_N[n] for n in rows]):
            for n in rows:
                blocks.append(Block(size, length + counts_N[n] - 1))
                starts[n] = (size, size + length)
                size += blocks[-1].tokens
            continue
        origin = size
        blocks.append(Block(origin, length))
        size += length
        for n in rows:
            starts[n] = (origin, size)
            if counts_N[n] > 1:
                blocks.append(Block(size, counts_N[n] - 1, origin, length))
                size += counts_N[n] - 1
    return starts, blocks
