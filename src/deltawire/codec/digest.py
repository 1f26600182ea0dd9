"""Computes the digest: an additive checksum of a model's bits, in two 64-bit lanes that wrap
around.

digest(model) is the sum of mix(key, u, b) over every tensor and every unit u of it, b being the
unit's bits. A unit is an element of 1, 2 or 4 bytes, or one half, low half first, of an element
of 8. The key K is the first 8 bytes, little-endian, of BLAKE3 of the tensor's name in UTF-8. With
lo and hi the halves of a 64-bit word, and every sum and product modulo 2^64:

    x = K + (u + 1) · 0x9E3779B97F4A7C15
    p = (lo(x) XOR b) · (hi(x) OR 1)
    q = p XOR (p >> 29)
    lane0 += q
    lane1 += lo(q) · (hi(q) XOR lo(x))

The reason for this mix: each product is one multiplication of 32 by 32 bits to 64, which every
vector unit has. For a fixed unit q is one-to-one in b, so lane0 finds any single changed unit for
certain. lane1 uses lo(x) once more, because q depends only on lo(x) XOR b and hi(x) OR 1: were
lane1 made of lo(q) · (hi(q) OR 1), it would repeat the lowest bit of lane0, and two flips of the
same bit in two units would cancel in both lanes for about one pair of units in 2^58; as it is, for
about one in 2^65. Both figures are counts on twins of the mix with words of 6, 8, 10 and 12 bits,
extrapolated to 32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltawire import _native
from deltawire.codec.dtypes import Bits, require_bits
from deltawire.codec.patch import Patch
from deltawire.errors import CorruptError, InputError

STEP: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: neighboring units get words that are far apart."""

MASK: Final = 2**64 - 1

_HEX = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest, or the difference of two: both lanes lie in 0 to 2^64 - 1.

    Example::

        digest = digest_model({"a": np.zeros(4, np.uint16)})
        assert Digest.from_hex(digest.hex()) == digest
    """

    lane0: int
    lane1: int

    def __add__(self, other: Digest) -> Digest:
        """Lane by lane, modulo 2^64."""
        return Digest((self.lane0 + other.lane0) & MASK, (self.lane1 + other.lane1) & MASK)

    def __sub__(self, other: Digest) -> Digest:
        """Lane by lane, modulo 2^64."""
        return Digest((self.lane0 - other.lane0) & MASK, (self.lane1 - other.lane1) & MASK)

    def hex(self) -> str:
        """32 lower-case hexadecimal digits: lane0, then lane1."""
        return f"{self.lane0:016x}{self.lane1:016x}"

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """Parses the output of ``hex``. Raises CorruptError for anything else."""
        if not _HEX.fullmatch(text):
            raise CorruptError(f"{text[:64]!r} is not a digest of 32 hexadecimal digits")
        return cls(int(text[:16], 16), int(text[16:], 16))


ZERO: Final = Digest(0, 0)
"""The digest of nothing."""


@lru_cache(maxsize=1 << 16)
def tensor_key(name: str) -> int:
    """Returns the 64-bit key of the tensor ``name``."""
    return int.from_bytes(blake3(name.encode()).digest(8), "little")


def digest_bits(name: str, bits: Bits, start: int = 0) -> Digest:
    """Returns the digest's part for ``bits``, uint[N]: elements ``start`` to start + N of ``name``.

    Raises InputError if they are not contiguous bits, or ``start`` is negative.
    """
    require_bits(bits)
    _require_start(start)
    return Digest(*_native.digest(bits, tensor_key(name), start))


def digest_rounded(name: str, values: NDArray[np.float32], start: int = 0) -> Digest | None:
    """Returns the digest's part for ``values``, float32[N], rounded to bf16 in one pass: elements
    ``start`` to start + N of ``name``. Rounds to nearest, ties to even, as torch does.

    None if one of them is no number: torch rounds those to different bits in different loops.
    Raises InputError if they are no contiguous vector of float32, or ``start`` is negative.
    """
    if values.dtype != np.float32 or values.ndim != 1 or not values.flags.c_contiguous:
        raise InputError(f"{name} is no contiguous vector of float32")
    _require_start(start)
    lanes = _native.digest_rounded(values, tensor_key(name), start)
    return None if lanes is None else Digest(*lanes)


def digest_at(name: str, positions: NDArray[np.int64], bits: Bits) -> Digest:
    """Returns the digest's part for ``bits``, uint[N], at ``positions``, int64[N], of ``name``.

    Raises InputError if they are not contiguous bits, or their number differs from that of the
    positions.
    """
    require_bits(bits)
    if positions.dtype != np.int64 or positions.shape != bits.shape:
        raise InputError(f"{positions.size} positions of {bits.size} elements")
    return Digest(*_native.digest_at(positions, bits, tensor_key(name)))


def digest_patch(name: str, patch: Patch, old_bits: Bits, start: int = 0) -> Digest:
    """Returns the digest's change when ``patch`` replaces ``old_bits``, uint[N], at its positions.

    ``start`` is the flat index in the tensor ``name`` of the patch's position 0: the first element
    of the piece for a patch of a piece. Raises InputError if ``old_bits`` differ from the patch's
    in number or width, or ``start`` is negative.
    """
    require_bits(old_bits)
    _require_start(start)
    if old_bits.dtype != patch.bits.dtype or old_bits.size != len(patch):
        raise InputError(
            f"the patch holds {len(patch)} elements of {patch.bits.dtype}, "
            f"the old bits are {old_bits.size} of {old_bits.dtype}"
        )
    units = 2 if old_bits.dtype.itemsize == 8 else 1
    key = (tensor_key(name) + units * start * STEP) & MASK
    new = Digest(*_native.digest_at(patch.positions, patch.bits, key))
    return new - Digest(*_native.digest_at(patch.positions, old_bits, key))


def digest_model(bits_by_name: Mapping[str, Bits]) -> Digest:
    """Returns the digest of a whole model: tensor names to bits, uint[N] each.

    Raises InputError if one of them is not contiguous bits.
    """
    total = ZERO
    for name, bits in bits_by_name.items():
        total += digest_bits(name, bits)
    return total


def _require_start(start: int) -> None:
    if start < 0:
        raise InputError(f"the start of a piece is {start}, below 0")
