"""Quantizes weights that change from version to version, with scales that rarely do.

A block's scale is kept as long as the block's peak stays in a range around it, and is chosen again
once it leaves that range. So a version's codes follow from its weights and from the scales of the
version before, and a step that moves few weights far enough changes few codes::

    keep the scale   while   low · scale ≤ peak < high · scale,   or the peak is 0

=========  =====  =====  =========================================================================
format     low    high   why
=========  =====  =====  =========================================================================
fp8-block  112    464    464 still rounds to 448, the largest code; 112 loses two bits of range
int4-g32   6.51   7.5    the peak's code stays ±7, to which 6.5, a tie, does not round
mxfp4      3      8      OCP's rule, which has 4 to 8, with a quarter of slack below
=========  =====  =====  =========================================================================

Scales are chosen as the formats choose them, except that fp8 blocks may have a power of two, the
smallest that holds the peak, and that a block of zeros has scale 1. Weights that round to zero have
the code of +0: otherwise a weight that moves about zero would change its code without effect.

`deltawire.quantization.dequantize.requantize` chooses scales too, for merges, by another rule. The
two cannot be one:

- Here a version must follow from weights and scales only: a trainer that starts again reads no
  codes, and ranks that share a block exchange its peak, one float. `requantize` needs the codes of
  the version before, and sums of errors over whole blocks.
- A scale stays for many versions. `requantize` takes any new one that is nearer to the weights: in
  steps of 0.1 % of Gaussian weights, 1.6 to 1.9 % of the blocks of fp8 and int4 get another scale
  in each version, here none. (It keeps the old code where two are equally near, so fewer codes
  change: 0.19 instead of 0.25 % in int4, 0.12 instead of 0.33 % in MXFP4.)
- A base's scales come from any quantizer and may lie outside of these ranges. For int4 scales four
  times as large, this rule moved a merged weight 154 times as far from the sum as the base is.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deltawire.errors import InputError
from deltawire.quantization.formats import ROWS, PackedFormat
from deltawire.quantization.fp8 import Fp8Block

RANGES: Final = {"fp8-block": (112.0, 464.0), "int4-g32": (6.51, 7.5), "mxfp4": (3.0, 8.0)}
"""The range of peak / scale in which a scale is kept, by format: ``(low, high)``."""

_LARGEST_E4M3_MANTISSA: Final = 0.875
"""448 is 0.875 · 2^9."""


def quantize_sticky(
    form: PackedFormat,
    weight: Tensor,
    held: Tensor | None,
    *,
    power_of_two: bool = False,
    peaks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Packs a weight, [..., R, C] of any float dtype, and keeps those of the scales ``held`` that
    still fit; None chooses all.

    ``held`` is the part ``scales`` of an earlier result. ``power_of_two`` is for ``fp8-block``, and
    so are ``peaks``, float32[..., blocks down, blocks across]: those of blocks of which ``weight``
    has only some rows.
    The same weight and scales always give the same bits, and quantizing again with the resulting
    scales changes nothing. Takes memory for `ROWS` rows besides the result's. Raises `InputError`
    if a value is not finite, or the columns do not fit.
    """
    if weight.ndim == 2 and len(weight) > ROWS:
        blocks = ROWS // form.block[0]
        rows = torch.split(weight, ROWS)
        some = [
            quantize_sticky(
                form,
                part,
                None if held is None else held[number * blocks : (number + 1) * blocks],
                power_of_two=power_of_two,
                peaks=None if peaks is None else peaks[number * blocks : (number + 1) * blocks],
            )
            for number, part in enumerate(rows)
        ]
        return {name: torch.cat([parts[name] for parts in some]) for name in some[0]}
    weight = weight.float()
    if not bool(torch.isfinite(weight).all()):
        raise InputError(f"a weight that is not finite cannot be packed as {form.name}")
    form.layout(tuple(weight.shape))
    peaks = form.block_peaks(weight) if peaks is None else peaks
    scales = _scales(form, weight, peaks, held, power_of_two=power_of_two)
    full = form.per_weight(form.float_scales({"scales": scales}), tuple(weight.shape))
    ratio = weight / full
    least = min(value for value in form.code_values if value > 0)
    codes = form.encode(torch.where(ratio.abs() <= least / 2, 0.0, ratio))
    return {"codes": form.pack_codes(codes), "scales": scales.contiguous()}


def _scales(
    form: PackedFormat, weight: Tensor, peaks: Tensor, held: Tensor | None, *, power_of_two: bool
) -> Tensor:
    """Returns the scales that are held where they fit, and new ones elsewhere."""
    if held is None:
        return _fresh_scales(form, weight, peaks, power_of_two=power_of_two)
    low, high = RANGES[form.name]
    factors = form.float_scales({"scales": held})
    kept = (peaks == 0) | ((peaks >= low * factors) & (peaks < high * factors))
    if form.block[0] != 1:
        fresh = _fresh_scales(form, weight, peaks, power_of_two=power_of_two)
        return torch.where(kept, held, fresh)
    # Choosing scales takes longer than all else, and few rows need any.
    rows = ~kept.all(-1)
    scales = held.clone()
    fresh = _fresh_scales(form, weight[rows], peaks[rows], power_of_two=power_of_two)
    scales[rows] = torch.where(kept[rows], held[rows], fresh)
    return scales


def quantize_rows(
    form: PackedFormat,
    rows: Tensor,
    first: int,
    held: Tensor | None,
    *,
    power_of_two: bool = False,
    peaks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Packs some rows of a matrix, [N, C] from row ``first``, to the bits that `quantize_sticky`
    gives them among all rows.

    The codes are those of the rows; ``scales``, ``held`` and ``peaks`` are those of all blocks that
    the rows lie in. Without ``peaks``, other rows of these blocks must not have larger weights.
    """
    parts = quantize_sticky(
        form, _from_block(form, rows, first), held, power_of_two=power_of_two, peaks=peaks
    )
    return {**parts, "codes": parts["codes"][len(parts["codes"]) - len(rows) :]}


def peaks_of_rows(form: PackedFormat, rows: Tensor, first: int) -> Tensor:
    """Returns the peaks, among some rows of a matrix, [N, C] from row ``first``, of the blocks that
    they lie in: float32[blocks down, blocks across]."""
    return form.block_peaks(_from_block(form, rows, first).float())


def _from_block(form: PackedFormat, rows: Tensor, first: int) -> Tensor:
    """Adds rows of zeros above, so that the first row begins a block."""
    above = first % form.block[0]
    return torch.nn.functional.pad(rows, (0, 0, above, 0)) if above else rows


def _fresh_scales(
    form: PackedFormat, weight: Tensor, peaks: Tensor, *, power_of_two: bool
) -> Tensor:
    """Returns the scales that the weight would have without a version before."""
    one = torch.full((), 127 if form.scale_dtype == torch.uint8 else 1, dtype=form.scale_dtype)
    if power_of_two:
        mantissa, exponent = torch.frexp(peaks)
        exponent = torch.where(mantissa <= _LARGEST_E4M3_MANTISSA, exponent - 9, exponent - 8)
        fresh = torch.ldexp(torch.ones_like(peaks), exponent.clamp(min=-126))
    elif isinstance(form, Fp8Block):
        fresh = form.scales_of_peaks(peaks)
    else:
        fresh = form.choose_scales(weight)["scales"]
    # A scale of 0 would make its block unreadable: a tiny peak's may round to it.
    empty = (peaks == 0) | (form.float_scales({"scales": fresh}) == 0)
    return torch.where(empty, one, fresh)
