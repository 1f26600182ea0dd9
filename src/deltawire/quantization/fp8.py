"""8-bit floats (e4m3) in blocks of 128 × 128 with a float32 scale, as DeepSeek-V3 stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltawire.errors import CorruptError
from deltawire.quantization.formats import PackedFormat, Parts

_LARGEST = 448.0
_CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@dataclass(frozen=True)
class Fp8Block(PackedFormat):
    """The format `FP8_BLOCK`: scale = peak / 448. The codes 127 and 255 stand for NaN."""

    def check(self, parts: Parts, shape: tuple[int, ...]) -> None:
        """See `PackedFormat.check`; refuses codes that stand for NaN too."""
        super().check(parts, shape)
        if bool(((parts["codes"] & 127) == 127).any()):
            raise CorruptError(f"a code of a tensor in {self.name} is not a number")

    def choose_scales(self, weight: Tensor) -> dict[str, Tensor]:
        """See `PackedFormat.choose_scales`."""
        return {"scales": self.scales_of_peaks(self.block_peaks(weight))}

    def scales_of_peaks(self, peaks: Tensor) -> Tensor:
        """Returns the scales of blocks with these largest magnitudes."""
        return peaks / _LARGEST

    def encode(self, ratio: Tensor) -> Tensor:
        """See `PackedFormat.encode`."""
        return ratio.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


FP8_BLOCK = Fp8Block(
    "fp8-block",
    bits=8,
    block=(128, 128),
    scale_dtype=torch.float32,
    code_values=tuple(_CODES.view(torch.float8_e4m3fn).float().tolist()),
)
