"""The native kernels. They release the GIL, copy nothing and check shapes, types and layouts."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def digest(bits: NDArray[np.unsignedinteger[Any]], key: int, start: int) -> tuple[int, int]:
    """Both lanes of the digest of ``bits``, uint[N] contiguous, the first at flat index start."""

def digest_rounded(values: NDArray[np.float32], key: int, start: int) -> tuple[int, int] | None:
    """As `digest` for ``values``, float32[N] contiguous, rounded to bf16; None if one of them is no
    number."""

def digest_at(
    positions: NDArray[np.int64], bits: NDArray[np.unsignedinteger[Any]], key: int
) -> tuple[int, int]:
    """Both lanes of the digest of ``bits``, uint[N], at flat ``positions``, int64[N]."""

def exchange(
    live: list[NDArray[np.unsignedinteger[Any]]],
    lasts: NDArray[np.int64],
    index: NDArray[np.int64],
    old: NDArray[np.unsignedinteger[Any]],
    fresh: NDArray[np.unsignedinteger[Any]],
    threads: int,
) -> tuple[int, int]:
    """Puts ``fresh`` in the place of ``old`` at different places of ``live``, and reads it back.
    Changes ``lasts[k - 1]`` to ``lasts[k]`` lie in ``live[k]``.

    0 first if all is done; 1 if other bits lie there, 2 if others do afterwards, and where. Then,
    and if it raises `ValueError` for a place outside, nothing has changed."""

def dequantize4(
    codes: NDArray[np.uint8],
    values: NDArray[np.float32],
    scales: NDArray[np.float32],
    out: NDArray[np.uint16],
    threads: int,
) -> None:
    """Writes ``values[code] × scale``, rounded to bf16, for codes of 4 bits, uint8[N / 2], the
    first of a byte in its low half. ``values`` is float32[16], ``scales`` float32[groups of equal
    size], ``out`` uint16[N]. Raises `ValueError` if the sizes do not fit."""

def dequantize8(
    codes: NDArray[np.uint8],
    values: NDArray[np.float32],
    scales: NDArray[np.float32],
    columns: int,
    block_rows: int,
    block_columns: int,
    out: NDArray[np.uint16],
    threads: int,
) -> None:
    """As `dequantize4` for codes of 8 bits in a matrix of ``columns``: ``values`` is float32[256],
    and a block of rows and columns shares a scale; ``scales`` is row-major over the blocks."""

BLOCK: int
"""Elements of a delta's block, at most."""

WHOLE_BLOCK: int
"""Elements of an anchor's block."""

def simd() -> str:
    """The instructions in use: ``avx512``, ``avx2`` or ``portable``, as ``DELTAWIRE_SIMD`` asks."""

def encode(
    base: NDArray[np.unsignedinteger[Any]],
    target: NDArray[np.unsignedinteger[Any]],
    columns: int,
    mantissa: int,
    exponent: int,
    key: int | None,
    start: int,
    threads: int,
) -> tuple[list[bytes], int, int, int]:
    """A delta's blocks, how many elements change, and both lanes of what the digest gains."""

def encode_batch(
    parts: list[
        tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.unsignedinteger[Any]], int, int, int]
    ],
    mantissa: int,
    exponent: int,
    width: int,
) -> list[tuple[list[bytes], int, int, int]]:
    """`encode` of each (base, target, columns, key, start) with elements of ``width`` bytes, on one
    thread; the lock of the interpreter is released once."""

def decode(
    body: NDArray[np.uint8],
    lengths: NDArray[np.uint32],
    base: NDArray[np.unsignedinteger[Any]],
    columns: int,
    mantissa: int,
    exponent: int,
    first: int,
    last: int,
    key: int | None,
    start: int,
    threads: int,
) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger[Any]], int, int]:
    """Positions and new bits of blocks ``first`` to ``last``, and both lanes of what the digest
    gains; `ValueError` for a bad payload."""

def advance(
    body: NDArray[np.uint8],
    lengths: NDArray[np.uint32],
    base: NDArray[np.unsignedinteger[Any]],
    columns: int,
    mantissa: int,
    exponent: int,
    threads: int,
) -> int:
    """Changes ``base`` in place; how many elements. `ValueError` for a bad payload."""

def encode_whole(
    bits: NDArray[np.unsignedinteger[Any]], low: int, width: int, threads: int
) -> list[bytes]:
    """An anchor's blocks: ``width`` bits above the ``low`` lowest are ranked."""

def decode_whole(
    body: NDArray[np.uint8],
    lengths: NDArray[np.uint32],
    bits: NDArray[np.unsignedinteger[Any]],
    low: int,
    width: int,
    threads: int,
) -> None:
    """Fills ``bits``; `ValueError` for a bad payload."""
