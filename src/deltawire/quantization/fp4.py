"""4-bit floats (e2m1): MXFP4 with power-of-two scales, and NVFP4 with e4m3 scales.

MXFP4 follows the OCP Microscaling specification: 32 weights share 2^(byte − 127), with the exponent
floor(log2(peak)) − 2, and larger values saturate at 6. gpt-oss stores the same codes and bytes.

NVFP4: 16 weights share an e4m3 scale, and a matrix shares a float32 divisor, as compressed-tensors
stores it: weight = value × (scale / global_scale), with global_scale = 448 × 6 / peak. The divisor
is kept for each row, because the rows of a fused stack come from matrices of different divisors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from deltawire.quantization.formats import PackedFormat, Parts

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = _MAGNITUDES + tuple(-one for one in _MAGNITUDES)
_LARGEST = 6.0
_LARGEST_E4M3 = 448.0
_BIAS = 127


def _encode_e2m1(ratio: Tensor) -> Tensor:
    """Rounds to the nearest e2m1 value, ties to the even code, and saturates."""
    magnitude = ratio.abs()
    middles = torch.tensor(
        [(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)],
        device=ratio.device,
    )
    # A tie belongs to the even one of two neighboring codes: below 0.25 code 0, from 0.75 code 2 …
    below = torch.bucketize(magnitude, middles)
    above = torch.bucketize(magnitude, middles, right=True)
    code = torch.where(below % 2 == 0, below, above)
    return (code + 8 * torch.signbit(ratio)).to(torch.uint8)


@dataclass(frozen=True)
class Mxfp4(PackedFormat):
    """The format `MXFP4`; its scales are exponents, uint8."""

    def float_scales(self, parts: Parts) -> Tensor:
        """See `PackedFormat.float_scales`. The byte 255 stands for NaN."""
        exponents = parts["scales"]
        factors = torch.ldexp(
            torch.ones(exponents.shape, device=exponents.device),
            exponents.to(torch.int32) - _BIAS,
        )
        return torch.where(exponents == 255, torch.nan, factors)

    def choose_scales(self, weight: Tensor) -> dict[str, Tensor]:
        """See `PackedFormat.choose_scales`."""
        # frexp gives the exponent of a mantissa in [0.5, 1), which is one more than floor(log2).
        peaks = self.block_peaks(weight)
        _, exponent = torch.frexp(peaks)
        stored = torch.where(peaks == 0, 0, exponent - 1 - 2 + _BIAS)
        return {"scales": stored.clamp(0, 254).to(torch.uint8)}

    def encode(self, ratio: Tensor) -> Tensor:
        """See `PackedFormat.encode`."""
        return _encode_e2m1(ratio)


@dataclass(frozen=True)
class Nvfp4(PackedFormat):
    """The format `NVFP4`."""

    @property
    def by_rows(self) -> bool:
        """See `PackedFormat.by_rows`: one factor holds for all rows."""
        return False

    def layout(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `PackedFormat.layout`."""
        return {**super().layout(shape), "global_scale": (shape[:-1], torch.float32)}

    def float_scales(self, parts: Parts) -> Tensor:
        """See `PackedFormat.float_scales`."""
        return parts["scales"].float() / parts["global_scale"][..., None]

    def choose_scales(self, weight: Tensor) -> dict[str, Tensor]:
        """See `PackedFormat.choose_scales`."""
        peaks = self.block_peaks(weight)
        peak = peaks.amax((-2, -1))
        divisor = torch.where(
            peak == 0, 1.0, _LARGEST_E4M3 * _LARGEST / torch.where(peak == 0, 1.0, peak)
        )
        # Of tiny weights the divisor exceeds float32.
        divisor = divisor.clamp(max=torch.finfo(torch.float32).max)
        wanted = (peaks / _LARGEST * divisor[..., None, None]).clamp(max=_LARGEST_E4M3)
        rows = divisor[..., None].expand(peaks.shape[:-1]).contiguous()
        return {"scales": wanted.to(self.scale_dtype), "global_scale": rows}

    def encode(self, ratio: Tensor) -> Tensor:
        """See `PackedFormat.encode`."""
        return _encode_e2m1(ratio)


MXFP4 = Mxfp4("mxfp4", bits=4, block=(1, 32), scale_dtype=torch.uint8, code_values=_VALUES)
NVFP4 = Nvfp4("nvfp4", bits=4, block=(1, 16), scale_dtype=torch.float8_e4m3fn, code_values=_VALUES)
