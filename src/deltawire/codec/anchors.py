"""Encodes and decodes whole tensors or pieces: exponents by rank, in planes of yes-or-no decisions.

The exponents of floats are unevenly distributed; sign and mantissa are nearly even. The
exponent becomes its rank among the most frequent of its block, four decisions in the planes of
``native/planes.hpp``; the other bits are stored as they are. bf16 weights take about two thirds of
their raw size. `docs/FORMAT.md` has the bytes in tables.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from deltawire import _native
from deltawire.codec.delta import LENGTH, cores, layout_of
from deltawire.codec.dtypes import Bits, require_bits, unsigned
from deltawire.errors import CorruptError

MAGIC: Final = b"DWA1"
CODED, RAW = 0, 1
HEADER: Final = struct.Struct("<4sBBBBQ")
MOST_FIELD_BITS: Final = 8


class Field(NamedTuple):
    """The bit field that is ranked: ``width`` bits, above the ``low`` lowest bits."""

    low: int
    width: int


def field_of(dtype: str, itemsize: int) -> Field:
    """Returns the lowest 8 bits of a float's exponent, the highest 8 of an integer."""
    layout = layout_of(dtype)
    if layout.exponent:
        return Field(layout.mantissa, min(layout.exponent, MOST_FIELD_BITS))
    return Field(8 * itemsize - MOST_FIELD_BITS, MOST_FIELD_BITS)


def _fits(low: int, width: int, itemsize: int) -> bool:
    return 1 <= width <= MOST_FIELD_BITS and low + width <= 8 * itemsize


def encode_full(bits: Bits, dtype: str = "", *, threads: int | None = None) -> bytes:
    """Encodes ``bits``, uint[COUNT], of a wire dtype: at most 16 bytes more than their raw bytes.

    A dtype matters for floats; without one, bits are coded as integers. Raises InputError if they
    are not contiguous bits.
    """
    require_bits(bits)
    field = field_of(dtype, bits.itemsize)
    blocks = _native.encode_whole(bits, *field, threads or cores())
    lengths = np.fromiter(map(len, blocks), LENGTH, len(blocks))
    coded = int(lengths.sum(dtype=np.int64)) + lengths.nbytes < bits.nbytes
    mode = CODED if coded else RAW
    header = HEADER.pack(MAGIC, bits.itemsize, mode, *field, bits.size)
    parts = [lengths.tobytes(), *blocks] if coded else [bits.tobytes()]
    return b"".join([header, *parts])


def decode_full(
    payload: bytes | memoryview,
    count: int,
    itemsize: int,
    *,
    threads: int | None = None,
    into: Bits | None = None,
) -> Bits:
    """Returns the bits that ``encode_full`` was given: uint[count] of ``itemsize`` bytes each.

    Allocates memory in proportion to ``count``, regardless of the payload. With ``into``,
    uint[count], it allocates none: that array is filled and returned. Raises CorruptError if the
    payload is not one of ``count`` elements of ``itemsize`` bytes; the content of ``into`` is then
    undefined.
    """
    dtype = unsigned(itemsize)
    view = memoryview(payload).cast("B")
    if len(view) < HEADER.size:
        raise CorruptError("the anchor is shorter than its header")
    magic, its_itemsize, mode, low, width, its_count = HEADER.unpack_from(view)
    if magic != MAGIC or mode not in (CODED, RAW):
        raise CorruptError("the payload is not an anchor")
    if its_itemsize != itemsize or its_count != count:
        raise CorruptError(f"the payload is not one of {count} elements of {itemsize} bytes")
    # A raw anchor has no symbols, but its header is held to the same limits.
    if not _fits(low, width, itemsize):
        raise CorruptError(f"an anchor's symbols of {width} bits above {low} of {8 * itemsize}")
    body = view[HEADER.size :]
    if mode == RAW:
        if len(body) != count * itemsize:
            raise CorruptError("a raw anchor differs in length from its tensor")
        raw = np.frombuffer(body, dtype)
        if into is None:
            return np.require(raw, requirements="A")
        into[:] = raw
        return into
    at = -(-count // _native.WHOLE_BLOCK) * LENGTH.itemsize
    if len(body) < at:
        raise CorruptError("an anchor ends within its lengths")
    lengths = np.frombuffer(body[:at], LENGTH).astype(np.uint32)
    bits = np.empty(count, dtype) if into is None else into
    rest = np.frombuffer(body[at:], np.uint8)
    try:
        _native.decode_whole(rest, lengths, bits, low, width, threads or cores())
    except ValueError as error:
        raise CorruptError(str(error)) from error
    return bits
