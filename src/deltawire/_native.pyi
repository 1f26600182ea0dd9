"""The native kernels. They release the GIL, copy nothing and check nothing but shapes and types."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def digest(bits: NDArray[np.unsignedinteger[Any]], key: int, start: int) -> tuple[int, int]:
    """Both lanes of the digest of ``bits``, uint[N] contiguous, the first at flat index start."""

def digest_at(
    positions: NDArray[np.int64], bits: NDArray[np.unsignedinteger[Any]], key: int
) -> tuple[int, int]:
    """Both lanes of the digest of ``bits``, uint[N], at flat ``positions``, int64[N]."""

BLOCK: int
"""Elements of a block: the largest that ``encode_block`` and ``decode_block`` take."""

def simd() -> str:
    """The instructions in use: ``avx512``, ``avx2`` or ``portable``, as ``DELTAWIRE_SIMD`` asks."""

def encode_block(
    base: NDArray[np.unsignedinteger[Any]],
    target: NDArray[np.unsignedinteger[Any]],
    mantissa: int,
    exponent: int,
) -> tuple[bytes, int]:
    """A block's delta, and how many elements change."""

def decode_block(
    payload: NDArray[np.uint8],
    base: NDArray[np.unsignedinteger[Any]],
    mantissa: int,
    exponent: int,
    start: int,
    room: int,
) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger[Any]]]:
    """Positions, counted from ``start``, and new bits; raises `ValueError` for a bad payload or
    one of more than ``room`` changes."""
