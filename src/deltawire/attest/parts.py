"""Digests parts of a tensor: the elements at given indexes of each of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deltawire import codec
from deltawire.codec import Bits, Digest

CHUNK_ELEMENTS = 1 << 20
"""Elements whose positions are computed at a time: 8 MiB of them."""

Index = NDArray[np.int64]


def digest_part(name: str, shape: Sequence[int], indexes: Sequence[Index], bits: Bits) -> Digest:
    """Digests ``bits``, uint[N], the elements of the tensor ``name`` of ``shape`` at every
    combination of ``indexes``, one ascending array for each dimension, in row-major order."""
    if not bits.size:
        return codec.ZERO
    start = first_of_range(shape, indexes)
    if start is not None:
        return codec.digest_bits(name, bits, start)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    inner = np.zeros(1, np.int64)
    for index, stride in zip(indexes[1:], strides[1:], strict=True):
        inner = (inner[:, None] + index * stride).reshape(-1)
    total = codec.ZERO
    rows = max(1, CHUNK_ELEMENTS // inner.size)
    for first in range(0, len(indexes[0]), rows):
        outer = indexes[0][first : first + rows] * strides[0]
        positions = (outer[:, None] + inner).reshape(-1)
        begin = first * inner.size
        total += codec.digest_at(name, positions, bits[begin : begin + positions.size])
    return total


def first_of_range(shape: Sequence[int], indexes: Sequence[Index]) -> int | None:
    """Returns the flat index of the first of the elements at every combination of ``indexes`` if
    they lie one after the other, else None."""
    if not indexes:
        return 0
    whole = [len(index) == size for index, size in zip(indexes, shape, strict=True)]
    if not len(indexes[0]) or not all(whole[1:]) or not _is_range(indexes[0]):
        return None
    return int(indexes[0][0]) * math.prod(shape[1:])


def _is_range(index: Index) -> bool:
    return int(index[-1]) - int(index[0]) == len(index) - 1
