"""Elements of a map, by position: found, walked in parts, digested, and put into live dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltawire import codec
from deltawire.codec import Bits, Digest
from deltawire.placement.affine import AffineMap
from deltawire.placement.layout import TORCH_DTYPES

CHUNK_ELEMENTS = 1 << 21
"""Elements that are handled at once where all of them are."""

CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that carry bits, by their bytes."""

_ROW_ELEMENTS = 256
"""Rows of so many elements are worth a call of the vector kernel each."""

_HALF = np.uint32(16)
_LOWER = np.uint32(0xFFFF)


def locate(
    found: AffineMap, positions: NDArray[np.int64]
) -> tuple[slice | NDArray[np.intp], NDArray[np.int64]]:
    """Which of ``positions``, int64[N] ascending, a map knows, and their targets, int64[M].

    The map is in its simplest form: source dimensions are nested, so that dividing finds them.
    """
    first, last = np.searchsorted(positions, (found.source, found.source + found.source_extent))
    rest = positions[first:last] - found.source
    if found.source_strides in ((), (1,)):
        step = found.target_strides[0] if found.shape else 1
        return slice(int(first), int(last)), rest * step + found.target
    targets = np.full(rest.size, found.target, np.int64)
    known = np.ones(rest.size, np.bool_)
    for size, source, target in zip(
        found.shape, found.source_strides, found.target_strides, strict=True
    ):
        number = rest // source
        rest -= number * source
        known &= number < size
        targets += number * target
    known &= rest == 0
    inside = np.flatnonzero(known)
    return inside + first, targets[inside]


def chunks(found: AffineMap, limit: int = CHUNK_ELEMENTS) -> Iterator[AffineMap]:
    """A map in parts of at most ``limit`` elements, in the order of its source."""
    if found.count <= limit:
        yield found
        return
    size, source, target = found.shape[0], found.source_strides[0], found.target_strides[0]
    rows = max(1, limit // (found.count // size))
    for first in range(0, size, rows):
        part = AffineMap(
            found.source + first * source,
            found.target + first * target,
            (min(rows, size - first), *found.shape[1:]),
            found.source_strides,
            found.target_strides,
        )
        if rows > 1 or part.count <= limit:
            yield part
        else:
            inner = AffineMap(
                part.source,
                part.target,
                part.shape[1:],
                part.source_strides[1:],
                part.target_strides[1:],
            )
            yield from chunks(inner, limit)


def positions_of(part: AffineMap) -> NDArray[np.int64]:
    """The source positions of a map, int64[N]."""
    found = np.full((), part.source, np.int64)
    for size, stride in zip(part.shape, part.source_strides, strict=True):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return np.ascontiguousarray(found).reshape(-1)


def digest_part(name: str, part: AffineMap, bits: Bits) -> Digest:
    """The share of ``bits``, uint[N], that lie at the source positions of ``part``."""
    if not part.shape or part.source_strides == (1,):
        return codec.digest_bits(name, bits, part.source)
    if part.source_strides[-1] != 1 or part.shape[-1] < _ROW_ELEMENTS:
        return codec.digest_at(name, positions_of(part), bits)
    width = part.shape[-1]
    outer = AffineMap(part.source, 0, part.shape[:-1], part.source_strides[:-1], part.shape[:-1])
    total = codec.ZERO
    for row, start in enumerate(positions_of(outer).tolist()):
        total += codec.digest_bits(name, bits[row * width : (row + 1) * width], start)
    return total


def encode_bits(bits: Bits, dtypes: tuple[str, ...]) -> Bits:
    """Published bits, uint[N], as the live dtype has them."""
    if len(dtypes) == 1:
        return bits
    if dtypes == ("BF16", "F32"):
        return bits.astype(np.uint32) << _HALF
    values = tensor_of(bits).view(TORCH_DTYPES[dtypes[0]])
    for dtype in dtypes[1:]:
        values = values.to(TORCH_DTYPES[dtype])
    return array_of(plain_nans(values).view(CARRIER[values.element_size()]))


def equal_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether integers are alike, wherever they are; on the CPU NumPy is several times faster."""
    if found.device.type == "cpu":
        return np.array_equal(found.numpy(), expected.numpy())
    return torch.equal(found, expected.to(found.device))


def plain_nans(values: Tensor) -> Tensor:
    """All NaNs made one: which of them a conversion gives depends on the kernel that did it."""
    if not values.is_floating_point():
        return values
    return torch.where(values.isnan(), torch.full_like(values, torch.nan), values)


def decode_bits(bits: Bits, dtypes: tuple[str, ...]) -> Bits | None:
    """Live bits as the published dtype has them; None if they were never published.

    Of `Region.exact` regions only.
    """
    if len(dtypes) == 1:
        return bits
    if (bits & _LOWER).any():
        return None
    return (bits >> _HALF).astype(np.uint16)


def tensor_of(bits: NDArray[Any]) -> Tensor:
    """Bits as a tensor of integers, sharing memory where that may be written."""
    writable = np.require(bits, requirements=["C", "W"])
    kind = np.uint8 if bits.dtype.itemsize == 1 else f"i{bits.dtype.itemsize}"
    return torch.from_numpy(writable.view(kind))


def array_of(tensor: Tensor) -> Bits:
    """A CPU tensor of integers as bits, sharing its memory."""
    array: NDArray[Any] = tensor.numpy()
    return array.view(f"u{array.itemsize}")
