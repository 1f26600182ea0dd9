"""Divides quantized matrices by rows among ranks, which agree on the scales of shared blocks.

A rank publishes the codes of its own rows, and the scales of the blocks whose first row it holds. A
scale follows from its block's peak (`deltawire.quantization.sticky`). Where ranks hold rows of one
block, they exchange its peak in a single collective for all matrices; the result is the same on all
of them, and the same as on one rank::

    rank 0   rows   0 … 191   own block 0, and the upper half of block 1 ─┐ maximum
    rank 1   rows 192 … 383   the lower half of block 1, own block 2     ─┘ of two peaks

Formats whose blocks are one row high exchange nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deltawire.export.cast import cast
from deltawire.export.matrices import QuantizedMatrix
from deltawire.export.shards import shard_of
from deltawire.quantization.formats import PackedFormat
from deltawire.quantization.sticky import peaks_of_rows
from deltawire.sync.follow.mirror import Mirror


class MatrixRows(NamedTuple):
    """The rows of a matrix that this rank publishes, bf16[N, C] on the CPU, from row ``first``."""

    matrix: QuantizedMatrix
    first: int
    values: Tensor


def published_matrix_rows(
    matrices: Mapping[str, Sequence[QuantizedMatrix]], held: Mapping[str, Tensor], rank: int
) -> Iterator[MatrixRows]:
    """Yields the rows of all matrices that this rank publishes; all ranks call this together.

    ``matrices`` are those of each held tensor. Experts are divided whole.
    """
    for source, some in matrices.items():
        shard = shard_of(source, held[source], rank=rank, dtype=torch.bfloat16)
        if shard is None:
            continue
        first = shard.start // (held[source].numel() // held[source].shape[0])
        yield from _matrices_of(some, cast(shard.bits, "BF16"), first)


def rows_of_mirror(
    matrices: Mapping[str, Sequence[QuantizedMatrix]],
    shapes: Mapping[str, tuple[int, ...]],
    mirror: Mirror,
) -> Iterator[MatrixRows]:
    """Yields the rows of all matrices that a mirror of bf16 tensors holds, as views of it.

    ``matrices`` are those of each tensor of ``shapes``.
    """
    for source, some in matrices.items():
        bits = mirror.tensors.get(source)
        if bits is None or not bits.size:
            continue
        values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        first = mirror.starts.get(source, 0) // math.prod(shapes[source][1:])
        yield from _matrices_of(some, values.view(-1, *shapes[source][1:]), first)


def _matrices_of(
    some: Sequence[QuantizedMatrix], values: Tensor, first: int
) -> Iterator[MatrixRows]:
    """Yields the rows of the matrices of one tensor, of which ``values`` are rows from ``first``
    on."""
    for one in some:
        if one.index is None:
            yield MatrixRows(one, first, values)
        elif first <= one.index < first + len(values):
            yield MatrixRows(one, 0, one.of(values, first))


class SharedBlocks:
    """Agrees on the peaks of blocks whose rows lie on several ranks.

    ``group`` has all ranks; None is the default process group. A thread needs a separate group,
    because all ranks must make the calls of a group in one order. Which blocks of the ``matrices``
    are shared is found at the first call, and stays.

    Example::

        shared = SharedBlocks(open_format("fp8-block"), matrices)
        peaks = shared.agree(rows)  # by name; matrices without shared blocks have none
    """

    def __init__(
        self, form: PackedFormat, matrices: Sequence[QuantizedMatrix], group: Any = None
    ) -> None:
        self._form, self._group = form, group
        self._matrices = [one for one in matrices if one.index is None and form.block[0] > 1]
        self._places: dict[str, dict[int, slice]] | None = None
        self._count = 0

    def agree(self, rows: Sequence[MatrixRows]) -> dict[str, Tensor]:
        """Returns the peaks of the blocks that this rank's rows lie in, for matrices with shared
        ones: float32[blocks down, blocks across]. All ranks call this together."""
        if self._places is None:
            self._places = self._find(rows)
        if not self._count:
            return {}
        peaks, own = {}, []
        for one in rows:
            places = self._places.get(one.matrix.name, {})
            if not places:
                continue
            found = peaks[one.matrix.name] = peaks_of_rows(self._form, one.values, one.first)
            top = one.first // self._form.block[0]
            own += [
                (found[block - top], place)
                for block, place in places.items()
                if top <= block < top + len(found)
            ]
        agreed = torch.zeros(self._count)
        for part, place in own:
            agreed[place] = part
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        for part, place in own:
            part.copy_(agreed[place])
        return peaks

    def _find(self, rows: Sequence[MatrixRows]) -> dict[str, dict[int, slice]]:
        """Returns where the peaks of each shared block are exchanged: by matrix and block row."""
        if not self._matrices or not dist.is_initialized() or dist.get_world_size() == 1:
            return {}
        own = {one.matrix.name: one.first for one in rows}
        firsts = torch.tensor([own.get(one.name, 0) for one in self._matrices])
        every = [torch.zeros_like(firsts) for _ in range(dist.get_world_size())]
        dist.all_gather(every, firsts, group=self._group)
        high = self._form.block[0]
        places: dict[str, dict[int, slice]] = {}
        for one, found in zip(self._matrices, torch.stack(every, 1).tolist(), strict=True):
            across = self._form.grid(*one.shape)[1]
            places[one.name] = blocks = {}
            for block in sorted({first // high for first in found if first % high}):
                blocks[block] = slice(self._count, self._count + across)
                self._count += across
        return places
