"""Defines the formats that frozen weights are packed in, and their registry.

A format stores a code of 4 or 8 bits for each weight and a scale for each block of weights::

    weight [..., R, C] ── quantize ──▶ codes  uint8[..., R, C × bits / 8]
                                       scales dtype[..., ⌈R / block rows⌉, ⌈C / block columns⌉]
                                       global_scale float32[..., R]             (only in NVFP4)
                       ◀─ dequantize ─ bf16(values[code] × scale), rounded once

Leading dimensions stack matrices, such as the experts of a layer. Rows are outputs and columns
inputs, as in `torch.nn.Linear`. A new format is one module in this folder and one entry in
`deltawire.packed_formats.PACKED`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deltawire.errors import CorruptError, InputError
from deltawire.packed_formats import require_packed

ROWS = 256
"""Rows that are packed at a time, whole blocks of every format: memory is that of these rows."""

Parts = Mapping[str, Tensor]
"""The parts of a packed tensor: ``codes``, ``scales`` and, in NVFP4, ``global_scale``."""


@dataclass(frozen=True)
class PackedFormat:
    """A format of packed weights: the values of its codes, and the blocks that share a scale.

    ``block`` is the rows and columns of a block; 0 stands for all of them. Subclasses choose scales
    and codes.
    """

    name: str
    bits: int
    block: tuple[int, int]
    scale_dtype: torch.dtype
    code_values: tuple[float, ...]

    @property
    def by_rows(self) -> bool:
        """Returns whether no row's scale depends on rows outside of its block."""
        return True

    @cached_property
    def values(self) -> Tensor:
        """The value of each code, float32[2^bits]."""
        return torch.tensor(self.code_values, dtype=torch.float32)

    def layout(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each part of a packed tensor of ``shape``.

        Raises `InputError` if the columns are not whole blocks of 4-bit codes.
        """
        *stack, rows, columns = shape
        down, across = self.grid(rows, columns)
        if self.bits == 4 and columns % self.block[1]:
            raise InputError(
                f"{columns} columns are not a multiple of the {self.block[1]} that share a scale "
                f"in {self.name}",
                hint="leave this tensor unpacked, or choose another format",
            )
        return {
            "codes": ((*stack, rows, columns * self.bits // 8), torch.uint8),
            "scales": ((*stack, down, across), self.scale_dtype),
        }

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the number of blocks down and across a matrix."""
        high, wide = self.block[0] or rows, self.block[1] or columns
        return math.ceil(rows / max(high, 1)), math.ceil(columns / max(wide, 1))

    def check(self, parts: Parts, shape: tuple[int, ...]) -> None:
        """Raises `CorruptError` unless ``parts`` are a packed tensor of ``shape`` with finite
        scales."""
        wanted = self.layout(shape)
        if parts.keys() != wanted.keys():
            raise CorruptError(
                f"a tensor in {self.name} has {sorted(parts)} instead of {sorted(wanted)}"
            )
        for name, (size, dtype) in wanted.items():
            found = parts[name]
            if (tuple(found.shape), found.dtype) != (size, dtype):
                raise CorruptError(
                    f"the {name} of a tensor in {self.name} are {found.dtype}{list(found.shape)} "
                    f"instead of {dtype}{list(size)}",
                    hint="the checkpoint has another grid than its configuration says",
                )
        if not bool(torch.isfinite(self.float_scales(parts)).all()):
            raise CorruptError(f"a scale of a tensor in {self.name} is not finite")

    def float_scales(self, parts: Parts) -> Tensor:
        """Returns the factor of each block, float32[..., blocks down, blocks across]."""
        return parts["scales"].float()

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Packs a weight of any float dtype; raises `InputError` if a value is not finite."""
        if self.by_rows and weight.ndim == 2 and len(weight) > ROWS:
            some = [self.quantize(rows) for rows in torch.split(weight, ROWS)]
            return {name: torch.cat([parts[name] for parts in some]) for name in some[0]}
        weight = weight.float()
        if not bool(torch.isfinite(weight).all()):
            raise InputError(f"a weight that is not finite cannot be packed as {self.name}")
        self.layout(tuple(weight.shape))
        parts = self.choose_scales(weight)
        return {"codes": self.pack_codes(self.nearest_codes(weight, parts)), **parts}

    def nearest_codes(self, weight: Tensor, parts: Parts) -> Tensor:
        """Returns the code of each weight under the scales of ``parts``: uint8[..., R, C]."""
        scales = self.per_weight(self.float_scales(parts), tuple(weight.shape))
        ratio = torch.where(scales == 0, 0.0, weight / torch.where(scales == 0, 1.0, scales))
        return self.encode(ratio)

    def pack_codes(self, codes: Tensor) -> Tensor:
        """Returns one code a byte as they are stored: uint8[..., R, C × bits / 8]."""
        if self.bits == 4:
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return codes.contiguous()

    def choose_scales(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the scales for a weight, float32[..., R, C]."""
        raise NotImplementedError

    def encode(self, ratio: Tensor) -> Tensor:
        """Returns the codes, uint8, of weights that are divided by their scales."""
        raise NotImplementedError

    def decode_codes(self, parts: Parts) -> Tensor:
        """Returns the codes of all weights, one a byte: uint8[..., R, C]."""
        codes = parts["codes"]
        if self.bits == 8:
            return codes
        return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)

    def per_weight(self, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Repeats each block's scale for its weights: float32[..., R, C]."""
        rows, columns = shape[-2:]
        high, wide = self.block[0] or rows, self.block[1] or columns
        full = scales.repeat_interleave(high, -2).repeat_interleave(wide, -1)
        return full[..., :rows, :columns]

    def block_peaks(self, weight: Tensor) -> Tensor:
        """Returns the largest magnitude of each block: float32[..., blocks down, blocks across]."""
        return torch.amax(self._blocks(weight.abs()), (-3, -1))

    def block_sums(self, values: Tensor) -> Tensor:
        """Returns the sum of each block: float32[..., blocks down, blocks across]."""
        return self._blocks(values).sum((-3, -1))

    def _blocks(self, values: Tensor) -> Tensor:
        """Returns the blocks, padded with zeros: [..., down, block rows, across, block columns]."""
        *_, rows, columns = values.shape
        down, across = self.grid(rows, columns)
        high, wide = self.block[0] or rows, self.block[1] or columns
        padded = torch.nn.functional.pad(
            values, (0, across * wide - columns, 0, down * high - rows)
        )
        return padded.reshape(*values.shape[:-2], down, high, across, wide)


@contextmanager
def naming(tensor: str) -> Iterator[None]:
    """Adds a tensor's name to the errors of a format that the body raises."""
    try:
        yield
    except (CorruptError, InputError) as error:
        raise type(error)(f"{tensor[:200]}: {error.message}", hint=error.hint) from error


def open_format(name: str) -> PackedFormat:
    """Returns the format of that name; raises `InputError` for an unknown one."""
    module, _, member = require_packed(name).place.partition(":")
    found: PackedFormat = getattr(importlib.import_module(module), member)
    return found
