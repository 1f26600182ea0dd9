"""Writes packed weights as bf16 on a GPU with Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltawire.quantization.formats import PackedFormat

BLOCK = 1024
"""Bytes of codes per program."""

jit: Any = triton.jit


@jit
def _bf16_bits(value):
    """Rounds float32 to the nearest bf16, ties to even, as uint16; NaN becomes 0x7FC0."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    infinite: tl.constexpr = 0x7F800000
    return tl.where((bits & 0x7FFFFFFF) > infinite, 0x7FC0, rounded).to(tl.int16)


@jit(do_not_specialize=["count", "row_bytes", "rows", "high", "wide", "down", "across"])
def _dequantize(
    codes,
    values,
    scales,
    out,
    count,
    row_bytes,
    rows,
    high,
    wide,
    down,
    across,
    bits: tl.constexpr,
    block: tl.constexpr,
):
    """Writes the weights of ``count`` bytes of codes, one below the other matrix of the stack."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mine = at < count
    byte = tl.load(codes + at, mask=mine, other=0).to(tl.int32)
    row = at // row_bytes
    matrix = row // rows
    first = (matrix * down + (row % rows) // high) * across
    column = at % row_bytes
    if bits == 4:
        # Both halves of a byte lie in one block: blocks have an even number of columns.
        scale = tl.load(scales + first + (2 * column) // wide, mask=mine, other=0.0)
        low = tl.load(values + (byte & 15)) * scale
        high_half = tl.load(values + (byte >> 4)) * scale
        tl.store(out + 2 * at, _bf16_bits(low), mask=mine)
        tl.store(out + 2 * at + 1, _bf16_bits(high_half), mask=mine)
    else:
        scale = tl.load(scales + first + column // wide, mask=mine, other=0.0)
        tl.store(out + at, _bf16_bits(tl.load(values + byte) * scale), mask=mine)


def dequantize_blocks(form: PackedFormat, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes values[code] × scale into ``out``, bf16[..., R, C].

    ``codes`` is uint8[..., R, C × bits / 8] and ``scales`` float32[..., blocks down, across], all
    contiguous and on one device.
    """
    rows, columns = out.shape[-2:]
    down, across = scales.shape[-2:]
    _dequantize[(triton.cdiv(codes.numel(), BLOCK),)](
        codes,
        form.values.to(codes.device),
        scales,
        out.view(torch.int16),
        codes.numel(),
        codes.shape[-1],
        rows,
        form.block[0] or rows,
        form.block[1] or columns,
        down,
        across,
        bits=form.bits,
        block=BLOCK,
    )
