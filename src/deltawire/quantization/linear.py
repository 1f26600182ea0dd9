"""Layers over frozen weights that stay packed, forward and backward.

The forward pass dequantizes a weight, multiplies, and drops it; the backward pass dequantizes it
again for the gradient of the input. A frozen weight has no gradient, so neither input nor
dequantized weight is kept between the two::

    forward   y = x · Wᵀ       W = dequantize(parts), freed
    backward  ∂x = ∂y · W      W = dequantize(parts) again, freed

Both products are those that PyTorch computes over a frozen bf16 weight, so gradients of everything
upstream are equal to the bit. One kernel for both was slower on an H100 (docs/LOG.md).
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor, nn

from deltawire.errors import BugError, InputError
from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.formats import PackedFormat, Parts, open_format


class PackedWeight(nn.Module):
    """A frozen weight of ``shape`` [..., R, C] in a packed format, as uint8 parameters.

    The parameters hold the bytes of the format's parts, whatever their dtype: FSDP2 shards uint8
    along the first dimension and leaves it uint8 under mixed precision.

    Example::

        weight = PackedWeight("int4-g32", (128, 1536, 2048))
        weight.set(open_format("int4-g32").quantize(experts))
        weight.dequantized(5)      # bf16[1536, 2048]
    """

    def __init__(self, form: str, shape: tuple[int, ...], *, device: Any = None) -> None:
        super().__init__()
        self.form: PackedFormat = open_format(form)
        self.shape = shape
        for name, (size, dtype) in self.form.layout(shape).items():
            held = torch.empty(size, dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(_bytes(held), requires_grad=False))

    @torch.no_grad()
    def set(self, parts: Parts) -> None:
        """Copies parts into the parameters; raises `CorruptError` if they do not fit."""
        self.form.check(parts, self.shape)
        for name, part in parts.items():
            self.get_parameter(name).copy_(_bytes(part))

    def set_matrix(self, index: int, parts: Parts) -> None:
        """As `set`, for one matrix of a stack [E, R, C]."""
        self.set_rows(index, slice(0, self.shape[-2]), parts)

    @torch.no_grad()
    def set_rows(self, index: int | None, rows: slice, parts: Parts) -> None:
        """As `set`, for consecutive rows of the matrix, or of one matrix of a stack.

        Raises `InputError` if a block of the format would cross the end of the rows.
        """
        high = self.form.block[0] or self.shape[-2]
        if rows.start % high or (rows.stop % high and rows.stop != self.shape[-2]):
            raise InputError(
                f"rows {rows.start} to {rows.stop} are not whole blocks of {high} rows",
                hint=f"{self.form.name} cannot pack this model's fused projections",
            )
        self.form.check(parts, (rows.stop - rows.start, self.shape[-1]))
        for name, part in parts.items():
            held = self.get_parameter(name)
            matrix = held if index is None else held[index]
            step = high if name == "scales" else 1
            matrix[rows.start // step : -(-rows.stop // step)].copy_(_bytes(part))

    def parts(self, index: int | slice | None = None) -> dict[str, Tensor]:
        """Returns the parts, or those of some matrices of a stack, as views of the parameters.

        Of a stack that is divided over ranks, ``index`` counts this rank's matrices.
        """
        found = {}
        for name, (_, dtype) in self.form.layout(self.shape).items():
            held = self.get_parameter(name).detach()
            # Divided over ranks, and gathered by FSDP2: this rank's matrices.
            held = held.to_local() if hasattr(held, "to_local") else held
            part = held if index is None else held[index]
            found[name] = part if dtype == torch.uint8 else part.view(dtype).squeeze(-1)
        return found

    def dequantized(self, index: int | slice | None = None) -> Tensor:
        """Returns bf16[..., R, C], or that of some matrices of a stack."""
        return dequantize(self.form, self.parts(index))

    def extra_repr(self) -> str:
        """Names format and shape where a model is printed."""
        return f"{self.form.name}, shape={self.shape}"


class PackedLinear(nn.Module):
    """A frozen linear layer over a `PackedWeight`, for inputs of any float dtype."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x · Wᵀ + bias: [..., R] for an input [..., C]."""
        result = packed_matmul(x, self.weight)
        return result if self.bias is None else result + self.bias.to(result.dtype)


def packed_matmul(x: Tensor, weight: PackedWeight, index: int | None = None) -> Tensor:
    """Returns x · Wᵀ with the frozen weight, or with one matrix of a stack, dequantized to the
    dtype of ``x``."""
    result: Tensor = _PackedMatmul.apply(x, weight, index)  # type: ignore[no-untyped-call]
    return result


class _PackedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight, index: int | None) -> Tensor:
        ctx.weight, ctx.index = weight, index
        ctx.bytes = weight.parts()["codes"].numel()
        return nn.functional.linear(x, _briefly(weight, index).to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if (held := ctx.weight.parts()["codes"].numel()) != ctx.bytes:
            raise BugError(f"a packed weight has {held} bytes of codes, and had {ctx.bytes} before")
        return grad @ _briefly(ctx.weight, ctx.index).to(grad.dtype), None, None


_SCRATCH = threading.local()


def _briefly(weight: PackedWeight, index: int | None) -> Tensor:
    """Returns the dequantized weight in memory that this thread's next call overwrites.

    Fresh memory for each matrix would cost more page faults than the kernel takes.
    """
    if not isinstance(getattr(weight, "codes", None), Tensor) or weight.codes.device.type != "cpu":
        return weight.dequantized(index)
    parts = weight.parts(index)
    codes = parts["codes"]
    shape = (*codes.shape[:-1], codes.shape[-1] * 8 // weight.form.bits)
    count = math.prod(shape)
    held: Tensor | None = getattr(_SCRATCH, "memory", None)
    if held is None or held.numel() < count:
        held = _SCRATCH.memory = torch.empty(count, dtype=torch.bfloat16)
    return dequantize(weight.form, parts, out=held[:count].view(shape))


def _bytes(part: Tensor) -> Tensor:
    """Returns the bytes of a part: uint8 of its shape, and of its item size if that is above 1."""
    part = part.contiguous()
    return part if part.dtype == torch.uint8 else part.unsqueeze(-1).view(torch.uint8)
