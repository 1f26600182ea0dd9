"""Multiplies by packed weights on a GPU with Triton, without writing them dequantized to memory.

A program holds a tile of the result. It reads codes and scales of a tile of the weight, rounds
values[code] × scale to bf16 in registers, as `deltawire.quantization.dequantize` does in memory,
and adds the product in float32. Two 4-bit codes share a byte, the even column in the low half, so
even and odd columns are multiplied apart::

    y[M, R] = x[M, even] · low[R, C/2]ᵀ + x[M, odd] · high[R, C/2]ᵀ
    g · W   : out[M, even] = g[M, R] · low[R, C/2],  out[M, odd] = g[M, R] · high[R, C/2]
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltawire.quantization.formats import PackedFormat


def tiles_of(count: int) -> tuple[int, int, int, int]:
    """Returns the rows of the input, rows of the weight, and bytes of a row of codes in a program's
    tile, and its warps, for ``count`` rows of input."""
    del count
    return 32, 64, 32, 4


jit: Any = triton.jit


@jit
def _weights(code, scale, values):
    """Returns values[code] × scale, rounded to the nearest bf16, ties to even, as float32."""
    product = tl.load(values + code) * scale
    bits = product.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.to(tl.float32, bitcast=True)


@jit
def _product(left, right, half: tl.constexpr):
    """Returns left · right, summed in float32; both are exact in bf16 if ``half``."""
    if half:
        return tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), out_dtype=tl.float32)
    return tl.dot(left.to(tl.float32), right, input_precision="ieee", out_dtype=tl.float32)


@jit
def _scale(scales, row, column, valid, high, wide, across):
    """Loads the scale of each weight of a tile, float32."""
    return tl.load(scales + (row // high) * across + column // wide, mask=valid, other=0.0)


@jit(do_not_specialize=["count", "rows", "row_bytes", "high", "wide", "across"])
def _forward(
    x,
    codes,
    values,
    scales,
    out,
    count,
    rows,
    row_bytes,
    high,
    wide,
    across,
    bits: tl.constexpr,
    half: tl.constexpr,
    tile_m: tl.constexpr,
    tile_r: tl.constexpr,
    tile_b: tl.constexpr,
):
    """Writes x[M, C] · W[R, C]ᵀ, a tile [tile_m, tile_r] in each program."""
    m = (tl.program_id(0) * tile_m + tl.arange(0, tile_m)).to(tl.int64)[:, None]
    r = (tl.program_id(1) * tile_r + tl.arange(0, tile_r)).to(tl.int64)
    columns = row_bytes * 8 // bits
    total = tl.zeros((tile_m, tile_r), dtype=tl.float32)
    for start in range(0, row_bytes, tile_b):
        b = start + tl.arange(0, tile_b)
        # The weight's tile is [bytes, rows]: transposed as it is read.
        inside = (b[:, None] < row_bytes) & (r[None, :] < rows)
        byte = tl.load(codes + r[None, :] * row_bytes + b[:, None], mask=inside, other=0)
        byte = byte.to(tl.int32)
        taken = (m < count) & (b[None, :] < row_bytes)
        if bits == 4:
            factor = _scale(scales, r[None, :], 2 * b[:, None], inside, high, wide, across)
            at = x + m * columns + 2 * b[None, :]
            even = tl.load(at, mask=taken, other=0.0)
            odd = tl.load(at + 1, mask=taken, other=0.0)
            total += _product(even, _weights(byte & 15, factor, values), half)
            total += _product(odd, _weights(byte >> 4, factor, values), half)
        else:
            factor = _scale(scales, r[None, :], b[:, None], inside, high, wide, across)
            given = tl.load(x + m * columns + b[None, :], mask=taken, other=0.0)
            total += _product(given, _weights(byte, factor, values), half)
    inside = (m < count) & (r[None, :] < rows)
    tl.store(out + m * rows + r[None, :], total, mask=inside)


@jit(do_not_specialize=["count", "rows", "row_bytes", "high", "wide", "across"])
def _backward(
    grad,
    codes,
    values,
    scales,
    out,
    count,
    rows,
    row_bytes,
    high,
    wide,
    across,
    bits: tl.constexpr,
    half: tl.constexpr,
    tile_m: tl.constexpr,
    tile_r: tl.constexpr,
    tile_b: tl.constexpr,
):
    """Writes grad[M, R] · W[R, C]: the columns of tile_b bytes in each program."""
    m = (tl.program_id(0) * tile_m + tl.arange(0, tile_m)).to(tl.int64)[:, None]
    b = tl.program_id(1) * tile_b + tl.arange(0, tile_b)[None, :]
    columns = row_bytes * 8 // bits
    low = tl.zeros((tile_m, tile_b), dtype=tl.float32)
    upper = tl.zeros((tile_m, tile_b), dtype=tl.float32)
    for start in range(0, rows, tile_r):
        r = (start + tl.arange(0, tile_r)).to(tl.int64)
        inside = (r[:, None] < rows) & (b < row_bytes)
        byte = tl.load(codes + r[:, None] * row_bytes + b, mask=inside, other=0).to(tl.int32)
        taken = (m < count) & (r[None, :] < rows)
        given = tl.load(grad + m * rows + r[None, :], mask=taken, other=0.0)
        if bits == 4:
            factor = _scale(scales, r[:, None], 2 * b, inside, high, wide, across)
            low += _product(given, _weights(byte & 15, factor, values), half)
            upper += _product(given, _weights(byte >> 4, factor, values), half)
        else:
            factor = _scale(scales, r[:, None], b, inside, high, wide, across)
            low += _product(given, _weights(byte, factor, values), half)
    inside = (m < count) & (b < row_bytes)
    if bits == 4:
        tl.store(out + m * columns + 2 * b, low, mask=inside)
        tl.store(out + m * columns + 2 * b + 1, upper, mask=inside)
    else:
        tl.store(out + m * columns + b, low, mask=inside)


def multiply(
    form: PackedFormat, codes: Tensor, scales: Tensor, x: Tensor, *, transposed: bool
) -> Tensor:
    """Returns x[M, C] · W[R, C]ᵀ, or x[M, R] · W[R, C] unless ``transposed``: float32.

    ``codes`` is uint8[R, C × bits / 8], ``scales`` float32[blocks down, across], and ``x`` float32
    or bf16, all contiguous and on one device.
    """
    rows, row_bytes = codes.shape
    columns = row_bytes * 8 // form.bits
    count = len(x)
    out = torch.empty((count, rows if transposed else columns), device=x.device)
    if not out.numel():
        return out
    tile_m, tile_r, tile_b, warps = tiles_of(count)
    across = triton.cdiv(rows, tile_r) if transposed else triton.cdiv(row_bytes, tile_b)
    kernel = _forward if transposed else _backward
    kernel[(triton.cdiv(count, tile_m), across)](
        x,
        codes,
        form.values.to(codes.device),
        scales,
        out,
        count,
        rows,
        row_bytes,
        form.block[0] or rows,
        form.block[1] or columns,
        scales.shape[-1],
        bits=form.bits,
        half=x.dtype == torch.bfloat16 and x.is_cuda,  # The interpreter has no bf16 products.
        tile_m=tile_m,
        tile_r=tile_r,
        tile_b=tile_b,
        num_warps=warps,
    )
    return out
