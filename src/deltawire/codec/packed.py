"""Encodes and decodes deltas of tensors whose elements each hold several codes of 4 bits.

A step changes one code of many. Coded by elements, a change would cost the position of its element
and the bits of all its codes; so codes are coded one by one, each with its own value as context::

    element, w bits ──▶ w / 4 codes, the lowest first ──▶ numbers from 0 to 15, in order of values
                                                              │  a delta of numbers, as of bytes
                                                              ▼
                                                          ``DWD2``

The order of `E2M1` is that of the numbers that a code stands for; −0 is below +0. A number's class
is its distance from the largest that changes, so each number has its own odds.

A writer guesses from a tensor's name that it holds codes, and takes the smaller payload: a wrong
guess costs time only. `docs/FORMAT.md` has the bytes in tables, and `deltawire.codec.reference` is
a slow implementation.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltawire import _native
from deltawire.codec.delta import (
    CODED,
    HEADER,
    Layout,
    cores,
    split_blocks,
)
from deltawire.codec.dtypes import Bits, require_alike
from deltawire.codec.patch import Patch
from deltawire.errors import CorruptError

MAGIC: Final = b"DWD2"
CODE_BITS: Final = 4

INTEGERS: Final = Layout(0, 4)
"""Codes whose values rise with their bits, such as those of int4 with an offset."""

E2M1: Final = Layout(1, 2)
"""Codes of a sign, two bits of exponent and one of mantissa, as MXFP4 and NVFP4 have."""

_NUMBER_OF_CODE: Final = np.array([*range(8, 16), *range(7, -1, -1)], np.uint8)
_CODE_OF_NUMBER: Final = np.argsort(_NUMBER_OF_CODE).astype(np.uint8)


class _PackedHeader(NamedTuple):
    codes: Layout
    columns: int


def codes_of(name: str, itemsize: int) -> Layout | None:
    """Returns the codes that the elements of a tensor of that name hold by the conventions of
    checkpoints, None if it is not known to hold any."""
    if name.endswith(".weight_packed") and itemsize == 4:
        return INTEGERS
    if name.endswith((".weight_packed", "_blocks")) and itemsize == 1:
        return E2M1
    return None


def encode_packed(
    base_bits: Bits,
    target_bits: Bits,
    codes: Layout,
    *,
    columns: int,
    threads: int | None = None,
) -> bytes:
    """Encodes the changes from ``base_bits``, uint[COUNT], to ``target_bits``, uint[COUNT], whose
    elements hold ``codes``; ``columns`` is the number of elements in a row, 0 if there are none.

    Takes two bytes for each byte of base and target. The payload may be larger than the target.
    Raises InputError if the two are not bits of the same length and width.
    """
    require_alike(base_bits, target_bits)
    columns *= _each(base_bits)
    if columns > _native.BLOCK:
        columns = 0
    blocks, *_ = _native.encode(
        numbers_of(base_bits, codes),
        numbers_of(target_bits, codes),
        columns,
        *INTEGERS,
        None,
        0,
        threads or cores(),
    )
    header = HEADER.pack(MAGIC, base_bits.itemsize, CODED, *codes, columns, base_bits.size)
    lengths = struct.pack(f"<{len(blocks)}I", *map(len, blocks))
    return b"".join([header, lengths, *blocks])


def decode_packed(
    payload: bytes | memoryview, base_bits: Bits, *, threads: int | None = None
) -> Patch:
    """Decodes the changes that ``payload`` holds for ``base_bits``, uint[COUNT].

    Takes memory in proportion to the base only. Raises CorruptError for anything that is not a
    payload for a base of this length and width.
    """
    view = memoryview(payload).cast("B")
    header = _read_header(view, base_bits)
    each, columns = _each(base_bits), header.columns
    numbers = numbers_of(base_bits, header.codes)
    lengths, rest = split_blocks(view[HEADER.size :], numbers.size, columns)
    try:
        positions, changed, *_ = _native.decode(
            rest, lengths, numbers, columns, *INTEGERS,
            0, lengths.size, None, 0, threads or cores(),
        )  # fmt: skip
    except ValueError as error:
        raise CorruptError(str(error)) from error
    if changed.size and int(changed.max()) > 15:
        raise CorruptError("a delta of 4-bit codes changes one to more than 4 bits")
    return _joined(base_bits, positions, _codes(changed, header.codes), each)


def numbers_of(bits: Bits, codes: Layout) -> NDArray[np.uint8]:
    """Returns the codes of elements, uint[N], as numbers in the order of their values: each below
    16, uint8[N · w / 4]."""
    packed = bits.view(np.uint8)
    numbers = np.empty(2 * packed.size, np.uint8)
    np.bitwise_and(packed, 15, out=numbers[0::2])
    np.right_shift(packed, 4, out=numbers[1::2])
    return _NUMBER_OF_CODE[numbers] if codes == E2M1 else numbers


def _codes(numbers: NDArray[np.uint8], codes: Layout) -> NDArray[np.uint8]:
    return _CODE_OF_NUMBER[numbers] if codes == E2M1 else numbers


def _each(bits: Bits) -> int:
    """Returns the number of codes in an element."""
    return 8 * bits.itemsize // CODE_BITS


def _joined(
    base_bits: Bits, positions: NDArray[np.int64], codes: NDArray[np.uint8], each: int
) -> Patch:
    """Returns changes of codes, ascending, as changes of the elements that hold them."""
    elements = positions // each
    first = np.flatnonzero(np.diff(elements, prepend=-1))
    if not first.size:
        return Patch(np.empty(0, np.int64), base_bits[:0])
    kind = base_bits.dtype.type
    shifts = (CODE_BITS * (positions % each)).astype(base_bits.dtype)
    masks = np.bitwise_or.reduceat(np.left_shift(kind(15), shifts), first)
    values = np.bitwise_or.reduceat(np.left_shift(codes.astype(base_bits.dtype), shifts), first)
    places = elements[first]
    return Patch(places, (base_bits[places] & ~masks) | values)


def _read_header(view: memoryview, base_bits: Bits) -> _PackedHeader:
    if len(view) < HEADER.size:
        raise CorruptError("the delta is shorter than its header")
    magic, itemsize, mode, mantissa, exponent, columns, count = HEADER.unpack_from(view)
    codes, each = Layout(mantissa, exponent), _each(base_bits)
    if magic != MAGIC or mode != CODED:
        raise CorruptError("the payload is not a delta of 4-bit codes")
    if itemsize != base_bits.itemsize or count != base_bits.size:
        raise CorruptError(
            f"a delta for {count} elements of {itemsize} bytes, "
            f"not {base_bits.size} of {base_bits.itemsize}"
        )
    if codes not in (INTEGERS, E2M1):
        raise CorruptError(f"a delta has the unknown 4-bit codes {tuple(codes)}")
    if columns % each or columns > _native.BLOCK:
        raise CorruptError(f"a delta has rows of {columns} codes")
    return _PackedHeader(codes, columns)


def is_packed(payload: bytes | memoryview) -> bool:
    """Returns whether a payload is a delta of 4-bit codes."""
    return bytes(memoryview(payload).cast("B")[: len(MAGIC)]) == MAGIC
