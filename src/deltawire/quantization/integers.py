"""Integer formats: int4 in groups of 32 inputs, and int8 rows.

Both are symmetric with a bf16 scale. int4 clamps to ±7 with scale = bf16(peak / 7), the grid of
Kimi K2's checkpoints. Packing a tensor that was dequantized to bf16 gives the same weights again.
The codes' layouts are compressed-tensors': a nibble holds the value + 8, and eight nibbles make a
little-endian int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltawire.quantization.formats import PackedFormat


@dataclass(frozen=True)
class IntegerFormat(PackedFormat):
    """Codes are integers of at most ``limit``, stored with ``offset``, modulo 2^bits."""

    limit: int = 0
    offset: int = 0

    def choose_scales(self, weight: Tensor) -> dict[str, Tensor]:
        """See `PackedFormat.choose_scales`.

        The scale is bf16(peak / limit), or one of its neighbors if that gives a block's weights
        exactly: the peak of a dequantized block is rounded, and may lead to a scale next to its
        own.
        """
        best: Tensor = (self.block_peaks(weight) / self.limit).to(self.scale_dtype)
        kept = self._exact(weight, best)
        for step in (-1, 1):
            other = (best.view(torch.int16) + step).view(self.scale_dtype)
            other = torch.where(best > 0, other, best)
            gained = self._exact(weight, other) & ~kept
            best, kept = torch.where(gained, other, best), kept | gained
        return {"scales": best}

    def encode(self, ratio: Tensor) -> Tensor:
        """See `PackedFormat.encode`."""
        whole = self._rounded(ratio).to(torch.int16) + self.offset
        codes: Tensor = (whole & (2**self.bits - 1)).to(torch.uint8)
        return codes

    def _rounded(self, ratio: Tensor) -> Tensor:
        return ratio.round().clamp(-self.limit, self.limit)

    def _exact(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Returns whether a scale gives all weights of its block: bool[..., blocks down, across]"""
        full = self.per_weight(scales.float(), tuple(weight.shape))
        found = (self._rounded(weight / torch.where(full == 0, 1, full)) * full).to(torch.bfloat16)
        return torch.eq(self.block_peaks((found.float() != weight).float()), 0)


INT4_G32 = IntegerFormat(
    "int4-g32",
    bits=4,
    block=(1, 32),
    scale_dtype=torch.bfloat16,
    code_values=tuple(float(code - 8) for code in range(16)),
    limit=7,
    offset=8,
)
INT8_ROW = IntegerFormat(
    "int8-row",
    bits=8,
    block=(1, 0),
    scale_dtype=torch.bfloat16,
    code_values=tuple(float(code - 256 if code >= 128 else code) for code in range(256)),
    limit=127,
    offset=0,
)
