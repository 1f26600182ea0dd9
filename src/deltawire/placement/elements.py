"""Finds, iterates, digests and converts the elements that an affine map covers."""

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
"""Elements handled at a time by passes over a whole map."""

CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes that carry bits, by width in bytes."""

_ROW_ELEMENTS = 256
"""Rows of at least this many elements are digested one by one with the vector kernel."""

_HALF = np.uint32(16)
_LOWER = np.uint32(0xFFFF)


def locate(
    found: AffineMap, positions: NDArray[np.int64]
) -> tuple[slice | NDArray[np.intp], NDArray[np.int64]]:
    """Returns which of ``positions`` a map covers, and their targets, int64[M].

    ``positions``, int64[N], ascend. The map must be in its simplest form: its source dimensions
    are nested, so division finds them.
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
    """Splits a map into parts of at most ``limit`` elements, in source order."""
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
    """Returns the source positions of a map, int64[N]."""
    found = np.full((), part.source, np.int64)
    for size, stride in zip(part.shape, part.source_strides, strict=True):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return np.ascontiguousarray(found).reshape(-1)


def digest_part(name: str, part: AffineMap, bits: Bits) -> Digest:
    """Digests ``bits``, uint[N], at the source positions of ``part``."""
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


def encode_bits(bits: Bits, dtypes: tuple[str, ...], scale: float = 1.0) -> Bits:
    """Converts published bits, uint[N], to the live dtype, and then multiplies by ``scale``."""
    if scale == 1.0 and len(dtypes) == 1:
        return bits
    if scale == 1.0 and dtypes == ("BF16", "F32"):
        return bits.astype(np.uint32) << _HALF
    values = tensor_of(bits).view(TORCH_DTYPES[dtypes[0]])
    for dtype in dtypes[1:]:
        values = values.to(TORCH_DTYPES[dtype])
    if scale != 1.0:
        values = values * scale
    return array_of(canonical_nans(values).view(CARRIER[values.element_size()]))


def equal_bits(found: Tensor, expected: Tensor) -> bool:
    """Compares integers on any device; on the CPU, NumPy is several times faster than torch."""
    if found.device.type == "cpu":
        return np.array_equal(found.numpy(), expected.numpy())
    return torch.equal(found, expected.to(found.device))


def canonical_nans(values: Tensor) -> Tensor:
    """Replaces all NaNs by a single one, because the NaN that a conversion gives depends on the
    kernel.
    """
    if not values.is_floating_point():
        return values
    return torch.where(values.isnan(), torch.full_like(values, torch.nan), values)


def decode_bits(bits: Bits, dtypes: tuple[str, ...]) -> Bits | None:
    """Converts live bits of a `Region.exact` region to the published dtype; None if no published
    value gives them."""
    if len(dtypes) == 1:
        return bits
    if dtypes[0] == "F16":
        with np.errstate(over="ignore"):
            halves = bits.view(np.float32).astype(np.float16)
        same = np.array_equal(halves.astype(np.float32).view(np.uint32), bits)
        return halves.view(np.uint16) if same else None
    if (bits & _LOWER).any():
        return None
    return (bits >> _HALF).astype(np.uint16)


def tensor_of(bits: NDArray[Any]) -> Tensor:
    """Returns bits as a tensor of integers, sharing memory that is writable."""
    writable = np.require(bits, requirements=["C", "W"])
    kind = np.uint8 if bits.dtype.itemsize == 1 else f"i{bits.dtype.itemsize}"
    return torch.from_numpy(writable.view(kind))


def array_of(tensor: Tensor) -> Bits:
    """Returns a CPU tensor of integers as bits, sharing its memory."""
    array: NDArray[Any] = tensor.numpy()
    return array.view(f"u{array.itemsize}")
