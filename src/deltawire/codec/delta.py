"""The coding of a delta: what changed, coded per class of the old weight.

Both sides hold the old weight, and with it the size of its unit in the last place: an optimizer
step that moves every weight about equally far changes the published bits of a small weight often
and those of a large one almost never. So elements are ranked within the class of their old
exponent, and each class has adaptive codes of its own for gaps between changes, signs, and
magnitudes in units of the last place. `deltawire.codec.reference` says the same slowly.

| bytes | what |
|---|---|
| 4 | magic ``DWD1`` |
| 1 | itemsize |
| 1 | mode: 0 classed, 1 raw |
| 1, 1 | bits below the exponent, bits of the exponent; 0 and 0 for integers |
| 8 | count of elements |
| 8 | changed: how many of them change |
| 4 each | classed: the length of each block of 2^20 elements, then the blocks |
| … | raw: the target's bits |

A block is a byte that counts its classes; the largest exponent ``top`` of a changed element as
uint16; for each class, ascending, one line; then their bit streams, in the same order. Class 0 has
exponents of ``top`` and more, class c those of top − c, class 11 all below. A line is the class's
number (with bit 4 set if any change exceeds one unit), a byte for the starting mean of gaps, and,
with bit 4, of runs and of excesses; then as LEB128 the changes and the stream's bytes.

A stream holds for each change, in order: the gap (unchanged members of the class before it), as
Rice code; a bit that is 1 if the ordered value falls; and, with bit 4, runs: at the start, and
behind every change that exceeds one unit but the last, how many changes of one unit come next; and
for a change that exceeds one unit, its magnitude − 2. ``native/bitstream.hpp`` has the Rice code
and its adaptation.

A payload is raw when the classed one would not be smaller, and so never exceeds the raw target by
more than 24 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from deltawire import _native
from deltawire.codec.dtypes import Bits, require_alike
from deltawire.codec.patch import Patch, diff
from deltawire.errors import CorruptError

MAGIC: Final = b"DWD1"
CLASSED, RAW = 0, 1
HEADER: Final = struct.Struct("<4sBBBBQQ")
LENGTH: Final = struct.Struct("<I")


class Layout(NamedTuple):
    """How an element's bits divide below the sign: ``exponent`` bits above ``mantissa`` bits."""

    mantissa: int
    exponent: int


INTEGER: Final = Layout(0, 0)
LAYOUTS: Final = {
    "F8_E4M3": Layout(3, 4),
    "F8_E5M2": Layout(2, 5),
    "F16": Layout(10, 5),
    "BF16": Layout(7, 8),
    "F32": Layout(23, 8),
    "F64": Layout(52, 11),
}
"""The layout of each float dtype; integers have none."""


def layout_of(dtype: str) -> Layout:
    """The layout of a wire dtype."""
    return LAYOUTS.get(dtype, INTEGER)


def encode(base_bits: Bits, target_bits: Bits, layout: Layout) -> bytes:
    """Code what turns ``base_bits``, uint[COUNT], into ``target_bits``, uint[COUNT].

    Raises InputError if the two are not bits of one length and width.
    """
    require_alike(base_bits, target_bits)
    blocks, changed = [], 0
    for start in range(0, base_bits.size, _native.BLOCK):
        place = slice(start, start + _native.BLOCK)
        block, count = _native.encode_block(base_bits[place], target_bits[place], *layout)
        blocks.append(block)
        changed += count
    lengths = [LENGTH.pack(len(block)) for block in blocks]
    header = (target_bits.itemsize, *layout, base_bits.size, changed)
    if sum(map(len, blocks)) + LENGTH.size * len(blocks) < target_bits.nbytes:
        return b"".join([_header(CLASSED, *header), *lengths, *blocks])
    return b"".join([_header(RAW, *header), target_bits.tobytes()])


def _header(
    mode: int, itemsize: int, mantissa: int, exponent: int, count: int, changed: int
) -> bytes:
    return HEADER.pack(MAGIC, itemsize, mode, mantissa, exponent, count, changed)


def decode_patch(payload: bytes | memoryview, base_bits: Bits) -> Patch:
    """The changes that ``payload`` holds for ``base_bits``, uint[COUNT].

    Takes memory in proportion to the base alone. Raises CorruptError for anything that is not a
    payload for a base of this length and width.
    """
    view = memoryview(payload)
    mode, layout, changed = _read_header(view, base_bits)
    body = view[HEADER.size :]
    if mode == RAW:
        if len(body) != base_bits.nbytes:
            raise CorruptError("a raw delta of another length than its base")
        patch = diff(base_bits, np.frombuffer(body, base_bits.dtype))
    else:
        patch = _decode_blocks(body, base_bits, layout, changed)
    if len(patch) != changed:
        raise CorruptError(f"a delta of {len(patch)} changes that says {changed}")
    return patch


def _read_header(view: memoryview, base_bits: Bits) -> tuple[int, Layout, int]:
    if len(view) < HEADER.size:
        raise CorruptError("a delta shorter than its header")
    magic, itemsize, mode, mantissa, exponent, count, changed = HEADER.unpack_from(view)
    layout = Layout(mantissa, exponent)
    if magic != MAGIC or mode not in (CLASSED, RAW):
        raise CorruptError("not a delta")
    if itemsize != base_bits.itemsize or count != base_bits.size:
        raise CorruptError(
            f"a delta for {count} elements of {itemsize} bytes, "
            f"not {base_bits.size} of {base_bits.itemsize}"
        )
    if layout != INTEGER and layout not in LAYOUTS.values():
        raise CorruptError(f"a delta of an unknown layout {tuple(layout)}")
    if layout != INTEGER and mantissa + exponent + 1 != 8 * itemsize:
        raise CorruptError("a delta whose layout does not fit its width")
    if changed > count:
        raise CorruptError(f"a delta of {changed} changes in {count} elements")
    return mode, layout, changed


def _decode_blocks(body: memoryview, base_bits: Bits, layout: Layout, changed: int) -> Patch:
    positions, bits, room = [np.empty(0, np.int64)], [np.empty(0, base_bits.dtype)], changed
    for start, block in _blocks(body, base_bits.size):
        base = base_bits[start : start + _native.BLOCK]
        try:
            where, what = _native.decode_block(
                np.frombuffer(block, np.uint8), base, *layout, start, room
            )
        except ValueError as error:
            raise CorruptError(str(error)) from error
        positions.append(where)
        bits.append(what)
        room -= len(where)
    return Patch(np.concatenate(positions), np.concatenate(bits))


def _blocks(body: memoryview, count: int) -> Iterator[tuple[int, memoryview]]:
    """Each block's first element and bytes."""
    starts = range(0, count, _native.BLOCK)
    at = len(starts) * LENGTH.size
    if len(body) < at:
        raise CorruptError("a delta ends within its lengths")
    for number, start in enumerate(starts):
        (length,) = LENGTH.unpack_from(body, number * LENGTH.size)
        if length > len(body) - at:
            raise CorruptError("a delta ends within a block")
        yield start, body[at : at + length]
        at += length
    if at != len(body):
        raise CorruptError("a delta with bytes behind its last block")
