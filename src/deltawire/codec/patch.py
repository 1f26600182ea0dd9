"""Defines patches: the positions at which a tensor's bits change, and the new bits.

Legend: N = changed elements; COUNT = elements of the tensor or piece; uint = unsigned integers of
an element's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltawire.codec.dtypes import Bits, require_alike, require_bits
from deltawire.errors import CorruptError, InputError

_CHUNK_ELEMENTS = 1 << 20
"""Elements compared at a time; the mask of differences then stays in the cache."""

_NOWHERE: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Patch:
    """A decoded delta: ``positions``, int64[N], strictly ascending and flat; ``bits``, uint[N].

    Example::

        patch = diff(base_bits, target_bits)
        before = undo(patch, base_bits)
        apply(patch, base_bits)  # base_bits now equals target_bits
    """

    positions: NDArray[np.int64]
    bits: Bits

    def __post_init__(self) -> None:
        require_bits(self.bits)
        if self.positions.dtype != np.int64 or self.positions.shape != self.bits.shape:
            raise InputError(
                f"positions must be int64[{self.bits.size}], "
                f"not {self.positions.dtype}{list(self.positions.shape)}"
            )

    def __len__(self) -> int:
        """Returns how many elements change."""
        return self.positions.size


def diff(base_bits: Bits, target_bits: Bits) -> Patch:
    """Returns the patch that turns ``base_bits``, uint[COUNT], into ``target_bits``, uint[COUNT].

    Takes memory for the patch and one chunk. Raises InputError if the two differ in
    length or width.
    """
    require_alike(base_bits, target_bits)
    found = []
    for start in range(0, base_bits.size, _CHUNK_ELEMENTS):
        stop = start + _CHUNK_ELEMENTS
        found.append(np.flatnonzero(base_bits[start:stop] != target_bits[start:stop]) + start)
    positions = np.concatenate(found).astype(np.int64, copy=False) if found else _NOWHERE
    return Patch(positions, target_bits[positions])


def apply(patch: Patch, target_bits: Bits) -> None:
    """Writes ``patch`` into ``target_bits``, uint[COUNT], in place.

    Raises CorruptError if a position is out of bounds, and InputError if the widths differ or
    the array is read-only; then nothing has been written.
    """
    _check_fits(patch, target_bits)
    if not target_bits.flags.writeable:
        raise InputError("the array to patch is read-only")
    target_bits[patch.positions] = patch.bits


def undo(patch: Patch, base_bits: Bits) -> Patch:
    """Returns the inverse of ``patch``: the bits of ``base_bits``, uint[COUNT], at its positions.

    Raises CorruptError if a position is out of bounds, and InputError if the widths differ.
    """
    _check_fits(patch, base_bits)
    return Patch(patch.positions, base_bits[patch.positions])


def _check_fits(patch: Patch, bits: Bits) -> None:
    require_bits(bits)
    if bits.dtype != patch.bits.dtype:
        raise InputError(f"the patch holds {patch.bits.dtype}, the array {bits.dtype}")
    # Check min and max, not first and last: an unsorted negative index would wrap around in NumPy.
    if len(patch) and (patch.positions.min() < 0 or patch.positions.max() >= bits.size):
        raise CorruptError(f"the patch has positions outside the {bits.size} elements")
