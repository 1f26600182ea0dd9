"""Multiplies by packed weights in one pass: the fused path of GPUs, and its twin in PyTorch.

Both multiply by bf16(values[code] × scale), the weights that `dequantize` writes, sum in float32
and round once to the dtype of the input. They differ by the order of the sum: for K products by at
most K · 2⁻²³ · Σ|xᵢ wᵢ| before that rounding: twice the bound of a float32 sum (Higham, Accuracy
and Stability of Numerical Algorithms, section 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltawire.quantization.dequantize import dequantize_with_torch
from deltawire.quantization.formats import PackedFormat, Parts

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of inputs that the kernel takes."""


def is_fused(x: Tensor) -> bool:
    """Returns whether an input is multiplied by the kernel: on a GPU, in a dtype of `DTYPES`."""
    return x.device.type == "cuda" and x.dtype in DTYPES


def multiply_packed(form: PackedFormat, parts: Parts, x: Tensor, *, transposed: bool) -> Tensor:
    """Returns x · Wᵀ, [..., R] for x [..., C], or x · W, [..., C] for x [..., R], unless
    ``transposed``; in the dtype of ``x``. ``parts`` are those of one matrix [R, C]."""
    from deltawire.quantization.triton_matmul import multiply

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    scales = form.float_scales(parts).contiguous()
    result = multiply(form, parts["codes"].contiguous(), scales, flat, transposed=transposed)
    return result.to(x.dtype).view(*x.shape[:-1], result.shape[-1])


def multiply_with_torch(form: PackedFormat, parts: Parts, x: Tensor, *, transposed: bool) -> Tensor:
    """Does what `multiply_packed` does with PyTorch alone, and with the dequantized weight in
    memory."""
    weight = dequantize_with_torch(form, parts).float()
    return (x.float() @ (weight.T if transposed else weight)).to(x.dtype)
