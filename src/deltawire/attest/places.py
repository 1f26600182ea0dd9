"""Digests parts of tensors that an engine or a file holds: strided boxes of a tensor's elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from deltawire import codec
from deltawire.codec import Bits, Digest
from deltawire.errors import CorruptError
from deltawire.wire.run import MAX_ELEMENTS, TensorSpec

CHUNK_ELEMENTS = 1 << 20
"""Elements whose positions are computed at a time: 8 MiB of them."""

Count = Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=16)]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Elements of a tensor: from ``start`` on, ``shape`` of them with one stride per dimension, in
    row-major order of ``shape``.

    Example::

        assert Place.whole(TensorSpec("w", (2, 3), "BF16")) == Place(0, (2, 3), (3, 1))
    """

    start: Count
    shape: Counts
    strides: Counts

    @classmethod
    def whole(cls, spec: TensorSpec) -> Place:
        """Returns the place of all elements of a tensor."""
        strides = tuple(math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape)))
        return cls(0, tuple(spec.shape), strides)

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def check(self, spec: TensorSpec) -> None:
        """Raises `CorruptError` unless the place lies inside the tensor."""
        last = self.start + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=False))
        inside = len(self.shape) == len(self.strides) and self.count <= spec.count
        if not inside or (self.count and last >= spec.count):
            raise CorruptError(f"a part of {spec.name[:80]!r} lies outside of it")

    def view(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns a view of the elements here of ``array``, the whole tensor's, in ``shape``."""
        if not self.count:
            return array[:0]
        strides = tuple(array.itemsize * one for one in self.strides)
        return as_strided(array[self.start :], self.shape, strides)

    def take(self, bits: Bits) -> Bits:
        """Returns the elements here of ``bits``, those of the whole tensor, uint[N]."""
        return np.ascontiguousarray(self.view(bits)).reshape(-1)

    def digest(self, name: str, bits: Bits) -> Digest:
        """Returns the digest's part of the tensor ``name`` if it had ``bits``, uint[N], here."""
        total = codec.ZERO
        for first, positions, count in self._runs():
            part = bits[first : first + count]
            if isinstance(positions, int):
                total += codec.digest_bits(name, part, positions)
            else:
                total += codec.digest_at(name, positions, part)
        return total

    def rows(self) -> list[Place]:
        """Returns the place of each row, an index of the first dimension."""
        if not self.shape:
            return [self]
        return [
            Place(self.start + row * self.strides[0], self.shape[1:], self.strides[1:])
            for row in range(self.shape[0])
        ]

    def _runs(self) -> Iterator[tuple[int, int | NDArray[np.int64], int]]:
        """Yields the first element, the position or the positions, and the number of elements of
        each part that is digested at once."""
        if not self.count:
            return
        shape, strides = _joined(self.shape, self.strides)
        if not shape or (len(shape) == 1 and strides[0] == 1):
            yield 0, self.start, self.count
            return
        inner = np.zeros(1, np.int64)
        for size, stride in zip(shape[1:], strides[1:], strict=True):
            inner = (inner[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        rows = max(1, CHUNK_ELEMENTS // inner.size)
        for first in range(0, shape[0], rows):
            outer = np.arange(first, min(first + rows, shape[0]), dtype=np.int64) * strides[0]
            positions = (self.start + outer[:, None] + inner).reshape(-1)
            yield first * inner.size, positions, positions.size


def _joined(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Joins dimensions that together have one stride, and leaves out those of size 1."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(size for size, _ in found), tuple(stride for _, stride in found)
