"""Exchanges and digests live bits on a GPU with Triton, many storages in one launch.

A move is split into blocks; a table gives for each block its storage's address and length, and
which changes belong to it. A digest is bound by integer arithmetic rather than by memory: about
twenty operations per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from deltawire.codec.digest import STEP
from deltawire.placement.affine import AffineMap
from deltawire.placement.kernels import Found, signed

BLOCK = 2048
"""Changes per program."""

_DIGEST_BLOCK = 1024
_DIGEST_ROUNDS = 16
_MAX_DIMS = 3
_POINTED: dict[int, Any] = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_WARPS = 8

jit: Any = triton.jit
# Triton would otherwise recompile for integers that are 1 or a multiple of 16.
_VARYING = [
    "target",
    "source",
    "count",
    "size1",
    "size2",
    "s0",
    "s1",
    "s2",
    "t0",
    "t1",
    "t2",
    "key",
]


@jit
def _check(table, index, bits, found, slot, kind: tl.constexpr, block: tl.constexpr):
    """Sets ``found[0]`` if a position lies outside, ``found[slot]`` if live bits differ."""
    row = table + 4 * tl.program_id(0)
    live = tl.load(row).to(tl.pointer_type(kind))
    size, first, count = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    place = tl.arange(0, block)
    mine = place < count
    at = tl.load(index + first + place, mask=mine, other=0).to(tl.int64)
    inside = mine & (at >= 0) & (at < size)
    held = tl.load(live + at, mask=inside, other=0)
    expected = tl.load(bits + first + place, mask=inside, other=0)
    outside = tl.max((mine & (inside == 0)).to(tl.int32))
    differing = tl.max((held != expected).to(tl.int32))
    tl.store(found, 1, mask=outside != 0)
    tl.store(found + slot, 1, mask=differing != 0)


@jit
def _write(table, index, bits, found, kind: tl.constexpr, block: tl.constexpr):
    """Writes the bits, unless a check found a fault."""
    faults = tl.load(found) | tl.load(found + 1)
    row = table + 4 * tl.program_id(0)
    live = tl.load(row).to(tl.pointer_type(kind))
    size, first = tl.load(row + 1), tl.load(row + 2)
    count = tl.where(faults == 0, tl.load(row + 3), 0)
    place = tl.arange(0, block)
    mine = place < count
    at = tl.load(index + first + place, mask=mine, other=0).to(tl.int64)
    inside = mine & (at >= 0) & (at < size)
    tl.store(live + at, tl.load(bits + first + place, mask=inside, other=0), mask=inside)


@jit(do_not_specialize=_VARYING)
def _digest(
    live,
    target,
    source,
    count,
    size1,
    size2,
    s0,
    s1,
    s2,
    t0,
    t1,
    t2,
    key,
    lanes,
    odd,
    step: tl.constexpr,
    dims: tl.constexpr,
    contiguous: tl.constexpr,
    width: tl.constexpr,
    widened: tl.constexpr,
    slots: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
):
    """Adds up the lanes of ``count`` elements; the last ``dims`` of three dimensions are in use.
    ``contiguous``: the last one has stride 1 on both sides."""
    mask: tl.constexpr = (1 << width) - 1 if width < 32 else 0xFFFFFFFF
    first_lane = tl.zeros((block,), tl.uint64)
    second_lane = tl.zeros((block,), tl.uint64)
    strange = tl.zeros((block,), tl.int32)
    begin = tl.program_id(0) * (rounds * block)
    for number in range(rounds):
        item = begin + number * block + tl.arange(0, block)
        mine = item < count
        inner, middle, outer = _coordinates(item, size1, size2, dims)
        if contiguous:
            position, at = source + inner, target + inner
        else:
            position, at = source + inner * s2, target + inner * t2
        if dims > 1:
            position += middle * s1 + outer * s0
            at += middle * t1 + outer * t0
        word = tl.load(live + at, mask=mine, other=0).to(tl.int64)
        if widened:
            strange |= (word & 0xFFFF).to(tl.int32)
            word = word >> 16
        bits = word & mask
        if width == 64:
            position = 2 * position
        words = ((position + 1) * step + key).to(tl.uint64, bitcast=True)
        folded, second = _mixed(words, bits.to(tl.uint64, bitcast=True))
        first_lane += tl.where(mine, folded, 0)
        second_lane += tl.where(mine, second, 0)
        if width == 64:
            words = ((position + 2) * step + key).to(tl.uint64, bitcast=True)
            upper = word.to(tl.uint64, bitcast=True) >> 32
            folded, second = _mixed(words, upper)
            first_lane += tl.where(mine, folded, 0)
            second_lane += tl.where(mine, second, 0)
    slot = tl.program_id(0) % slots
    tl.atomic_add(lanes + slot, tl.sum(first_lane).to(tl.int64, bitcast=True))
    tl.atomic_add(lanes + slots + slot, tl.sum(second_lane).to(tl.int64, bitcast=True))
    if widened:
        tl.store(odd, 1, mask=tl.max((strange != 0).to(tl.int32)) != 0)


@jit
def _coordinates(item, size1, size2, dims: tl.constexpr):
    """Splits an item's position in a walk over the last ``dims`` of three dimensions."""
    if dims == 1:
        inner, middle, outer = item, tl.zeros_like(item), tl.zeros_like(item)
    else:
        inner, rest = item % size2, item // size2
        if dims == 2:
            middle, outer = rest, tl.zeros_like(item)
        else:
            middle, outer = rest % size1, rest // size1
    return inner.to(tl.int64), middle.to(tl.int64), outer.to(tl.int64)


@jit
def _mixed(words, bits):
    """Computes both lanes of one element, as `codec.reference` defines them."""
    low = (words & 0xFFFFFFFF).to(tl.uint32)
    odd_half = ((words >> 32) | 1).to(tl.uint32)
    product = (low ^ bits.to(tl.uint32)).to(tl.uint64) * odd_half.to(tl.uint64)
    folded = product ^ (product >> 29)
    upper = (folded >> 32).to(tl.uint32) ^ low
    second = (folded & 0xFFFFFFFF) * upper.to(tl.uint64)
    return folded, second


class TritonKernels:
    """`Kernels` in Triton."""

    LARGEST = 1 << 30

    def table(self, spans: Sequence[tuple[Tensor, int, int]]) -> Tensor:
        """Returns int64[blocks, 4]: address, elements of the storage, first change, changes."""
        rows = []
        for live, first, last in spans:
            starts = np.arange(first, last, BLOCK, dtype=np.int64)
            row = np.empty((starts.size, 4), np.int64)
            row[:, 0], row[:, 1], row[:, 2] = live.data_ptr(), live.numel(), starts
            row[:, 3] = np.minimum(last - starts, BLOCK)
            rows.append(row)
        return torch.from_numpy(np.concatenate(rows))

    def exchange(self, table: Tensor, index: Tensor, old: Tensor, new: Tensor) -> Found:
        """See `Kernels`. Synchronizes the device once, at the end."""
        found = torch.zeros(3, dtype=torch.int32, device=index.device)
        grid, kind = (table.shape[0],), _POINTED[old.element_size()]
        with _current(index):
            _check[grid](table, index, old, found, 1, kind, BLOCK, num_warps=_WARPS)
            _write[grid](table, index, new, found, kind, BLOCK, num_warps=_WARPS)
            _check[grid](table, index, new, found, 2, kind, BLOCK, num_warps=_WARPS)
        return Found(*(bool(flag) for flag in found.tolist()))

    def write(self, table: Tensor, index: Tensor, bits: Tensor) -> None:
        """See `Kernels`. Synchronizes the device."""
        found = torch.zeros(3, dtype=torch.int32, device=index.device)
        kind = _POINTED[bits.element_size()]
        with _current(index):
            _write[(table.shape[0],)](table, index, bits, found, kind, BLOCK, num_warps=_WARPS)
        found.tolist()  # The caller may free what the kernel reads when this returns.

    def digest(
        self, flat: Tensor, part: AffineMap, key: int, *, widened: bool, lanes: Tensor, odd: Tensor
    ) -> bool:
        """See `Kernels`."""
        if len(part.shape) > _MAX_DIMS:
            return False
        missing = _MAX_DIMS - len(part.shape)
        sizes = (1,) * missing + part.shape
        sources = (0,) * missing + part.source_strides
        targets = (0,) * missing + part.target_strides
        rounds = _DIGEST_ROUNDS if part.count > _DIGEST_BLOCK * _DIGEST_ROUNDS else 1
        programs = -(-part.count // (_DIGEST_BLOCK * rounds))
        with _current(flat):
            _digest[(programs,)](
                flat,
                part.target,
                part.source,
                part.count,
                *sizes[1:],
                *sources,
                *targets,
                signed(key),
                lanes,
                odd,
                step=signed(STEP),
                dims=max(1, len(part.shape)),
                contiguous=sources[-1] == targets[-1] == 1,
                width=16 if widened else 8 * flat.element_size(),
                widened=widened,
                slots=lanes.shape[1],
                rounds=rounds,
                block=_DIGEST_BLOCK,
                num_warps=4,
            )
        return True


def _current(tensor: Tensor) -> Any:
    """Selects the tensor's device for launches; it need not be the current one."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
