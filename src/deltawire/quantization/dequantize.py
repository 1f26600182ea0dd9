"""Writes packed weights as bf16: on a CPU by the native kernel, elsewhere by Triton or PyTorch.

All three compute bf16(values[code] × scale) with one rounding, and give the same bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltawire import _native
from deltawire.quantization.formats import PackedFormat, Parts


def dequantize(form: PackedFormat, parts: Parts, *, out: Tensor | None = None) -> Tensor:
    """Returns the packed weights as bf16[..., R, C], on the device of ``parts``; in ``out``, bf16
    of that shape, if it is given and this device has a kernel."""
    codes = parts["codes"]
    scales = form.float_scales(parts)
    columns = codes.shape[-1] * 8 // form.bits
    if out is None:
        size = (*codes.shape[:-1], columns)
        out = torch.empty(size, dtype=torch.bfloat16, device=codes.device)
    if not out.numel():
        return out
    if codes.device.type == "cpu":
        return _on_cpu(form, codes, scales, out)
    if codes.device.type == "cuda":
        from deltawire.quantization.triton_kernels import dequantize_blocks

        dequantize_blocks(form, codes.contiguous(), scales.contiguous(), out)
        return out
    return dequantize_with_torch(form, parts)


def dequantize_with_torch(form: PackedFormat, parts: Parts) -> Tensor:
    """Does what `dequantize` does with PyTorch alone, and with more memory."""
    codes = form.decode_codes(parts)
    scales = form.per_weight(form.float_scales(parts), tuple(codes.shape))
    values = form.values.to(codes.device)
    return (values[codes.long()] * scales).to(torch.bfloat16)


def requantize(form: PackedFormat, weight: Tensor, base: Parts) -> dict[str, Tensor]:
    """Packs a weight that differs little from ``base``, which is packed: a block keeps its scale
    unless a new one is nearer to the weight.

    A new scale moves all weights of its block, by far more than a small change does. Under the old
    one a weight moves only if another code is nearer, so no block is further from the weight than
    ``base`` is, or than `PackedFormat.quantize` would be. In NVFP4 a row decides together.

    Versions that are quantized as training goes on have another rule:
    `deltawire.quantization.sticky`, which says why there are two.
    """
    weight = weight.float()
    fresh = form.quantize(weight)
    kept = {name: part for name, part in base.items() if name != "codes"}
    codes, old = form.nearest_codes(weight, kept), form.decode_codes(base)
    still = (dequantize(form, base).float() - weight).abs()
    moved = dequantize(form, {"codes": form.pack_codes(codes), **kept}).float() - weight
    codes = torch.where(still <= moved.abs(), old, codes)
    error = form.block_sums(torch.minimum(still, moved.abs()).square())
    error_of_fresh = form.block_sums((dequantize(form, fresh).float() - weight).square())
    if "global_scale" in kept:
        error, error_of_fresh = error.sum(-1, keepdim=True), error_of_fresh.sum(-1, keepdim=True)
    nearer = (error_of_fresh < error).expand(kept["scales"].shape)
    chosen = form.per_weight(nearer.float(), tuple(weight.shape)).bool()
    parts = {"codes": form.pack_codes(torch.where(chosen, form.decode_codes(fresh), codes))}
    for name, part in kept.items():
        where = nearer[..., 0] if name == "global_scale" else nearer
        bits = _INTEGERS[part.itemsize]
        new = fresh[name].contiguous().view(bits)
        parts[name] = torch.where(where, new, part.contiguous().view(bits)).view(part.dtype)
    return parts


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Scales of any dtype are chosen among as integers of their size."""


def relative_error(form: PackedFormat, weight: Tensor, parts: Parts) -> float:
    """Returns ‖dequantized − weight‖ / ‖weight‖ (Frobenius), 0 for a weight of zeros."""
    difference, norm = squared_error(form, weight, parts)
    return math.sqrt(difference / norm) if norm else 0.0


def squared_error(form: PackedFormat, weight: Tensor, parts: Parts) -> tuple[float, float]:
    """Returns ‖dequantized − weight‖² and ‖weight‖² (Frobenius)."""
    exact = weight.float()
    difference = float((dequantize(form, parts).float() - exact).norm())
    return difference**2, float(exact.norm()) ** 2


def _on_cpu(form: PackedFormat, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    threads = torch.get_num_threads()
    values = _values(form)
    if form.bits == 4:
        _native.dequantize4(
            _memory(codes),
            values,
            _memory(scales),
            out.view(-1).view(torch.uint16).numpy(),
            threads,
        )
        return out
    rows, columns = out.shape[-2:]
    high, wide = form.block[0] or rows, form.block[1] or columns
    # Matrices of whole blocks lie one below the other as one tall matrix.
    stacked = rows % high == 0
    for code, scale, to in zip(
        [codes] if stacked else codes.reshape(-1, rows, columns),
        [scales] if stacked else scales.reshape(-1, *scales.shape[-2:]),
        [out] if stacked else out.view(-1, rows, columns),
        strict=True,
    ):
        _native.dequantize8(
            _memory(code),
            values,
            _memory(scale),
            columns,
            high,
            wide,
            to.view(-1).view(torch.uint16).numpy(),
            threads,
        )
    return out


def _memory(tensor: Tensor) -> NDArray[Any]:
    """Returns the elements of a tensor as a flat array, which may share its memory.

    `torch.Tensor.numpy` would pin the memory's size, and FSDP2 frees gathered parameters by
    resizing them.
    """
    return np.from_dlpack(tensor.detach().contiguous().view(-1))


@functools.cache
def _values(form: PackedFormat) -> NDArray[np.float32]:
    values: NDArray[np.float32] = form.values.numpy()
    return values
