"""Encodes and decodes deltas: the changes, coded per class of the old weight.

Both sides hold the old weight, and with it the size of its unit in the last place: an optimizer
step that moves every weight about equally far changes the published bits of a small weight often
and those of a large one almost never. Each class of old exponents therefore has its own odds. A
delta is planes of yes-or-no decisions with a context each, coded by interleaved asymmetric numeral
systems (``native/planes.hpp``): which elements change; which of them by more than one unit, two,
four …; and in which direction, predicted from the other changes of the column. `docs/FORMAT.md` has
the bytes in tables, and `deltawire.codec.reference` is a slow implementation.

A payload is raw when the coded one would not be smaller, and so never exceeds the raw target by
more than 20 bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltawire import _native
from deltawire.codec.digest import ZERO, Digest, digest_patch, tensor_key
from deltawire.codec.dtypes import Bits, require_alike
from deltawire.codec.patch import Patch, diff
from deltawire.errors import CorruptError, InputError

MAGIC: Final = b"DWD1"
CODED, RAW = 0, 1
HEADER: Final = struct.Struct("<4sBBBBIQ")
LENGTH: Final = np.dtype("<u4")


class Layout(NamedTuple):
    """The layout of an element's bits below the sign: ``exponent`` bits above ``mantissa`` bits."""

    mantissa: int
    exponent: int


INTEGER: Final = Layout(0, 0)
LAYOUTS: Final = {
    "F8_E4M3": Layout(3, 4),
    "F8_E5M2": Layout(2, 5),
    "F8_E4M3FNUZ": Layout(3, 4),
    "F8_E5M2FNUZ": Layout(2, 5),
    "F16": Layout(10, 5),
    "BF16": Layout(7, 8),
    "F32": Layout(23, 8),
    "F64": Layout(52, 11),
}
"""The layout of each float dtype with a sign; integers, and F8_E8M0, which has no sign, have
none."""


class Delta(NamedTuple):
    """An encoded delta: its bytes, the number of changed elements, and what it adds to the model's
    digest.

    Example::

        delta = encode(base_bits, target_bits, layout_of("BF16"), columns=4096, name="lm_head")
        digest = digest + delta.moved
    """

    payload: bytes
    changed: int
    moved: Digest


class ChangedRange(NamedTuple):
    """Bits of elements ``start`` and on of the tensor ``name``, before and after, uint[COUNT]
    each; ``columns`` is the length of the tensor's rows, 0 if it has none.

    Example::

        change = ChangedRange("norm", old_bits, new_bits, start=0, columns=0)
        (delta,) = encode_batch([change], layout_of("BF16"))
    """

    name: str
    base_bits: Bits
    target_bits: Bits
    start: int
    columns: int


class _Header(NamedTuple):
    mode: int
    layout: Layout
    columns: int


def layout_of(dtype: str) -> Layout:
    """Returns the layout of a wire dtype."""
    return LAYOUTS.get(dtype, INTEGER)


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def block_elements(columns: int) -> int:
    """Returns the number of elements of a block: whole rows of ``columns``, if rows are known."""
    return _native.BLOCK // columns * columns if columns else _native.BLOCK


def encode(
    base_bits: Bits,
    target_bits: Bits,
    layout: Layout,
    *,
    columns: int,
    threads: int | None = None,
    name: str | None = None,
    start: int = 0,
) -> Delta:
    """Encodes the changes from ``base_bits``, uint[COUNT], to ``target_bits``, uint[COUNT].

    ``columns`` is the length of the tensor's rows, 0 if it has none. With ``name``, the digest's
    gain is that of elements ``start`` and on of the tensor of that name; otherwise it is zero.
    Raises InputError if the two are not bits of the same length and width.
    """
    require_alike(base_bits, target_bits)
    columns = _coded_columns(columns)
    key = None if name is None else tensor_key(name)
    coded = _native.encode(base_bits, target_bits, columns, *layout, key, start, threads or cores())
    return _delta(coded, target_bits, layout, columns)


def encode_batch(changes: Sequence[ChangedRange], layout: Layout) -> list[Delta]:
    """Encodes many small changes of one layout and width in one native call, on this thread.

    Each result equals that of `encode`. Raises InputError if a change's bits differ in length or
    width, or two changes in width.
    """
    if not changes:
        return []
    width = changes[0].base_bits.itemsize
    parts = []
    for name, base_bits, target_bits, start, columns in changes:
        require_alike(base_bits, target_bits)
        if base_bits.itemsize != width:
            raise InputError(f"bits of {base_bits.itemsize} and of {width} bytes in one batch")
        parts.append((base_bits, target_bits, _coded_columns(columns), tensor_key(name), start))
    coded = _native.encode_batch(parts, *layout, width)
    return [_delta(one, part[1], layout, part[2]) for one, part in zip(coded, parts, strict=True)]


def _coded_columns(columns: int) -> int:
    """Returns the length of rows that the coder uses, 0 if rows are too short or too long."""
    return 0 if columns < 2 or columns > _native.BLOCK else columns


def _delta(
    coded: tuple[list[bytes], int, int, int], target_bits: Bits, layout: Layout, columns: int
) -> Delta:
    """Builds the payload from coded blocks, or from the raw target if that is not longer."""
    blocks, changed, *lanes = coded
    size = LENGTH.itemsize * len(blocks) + sum(map(len, blocks))
    fits = size < target_bits.nbytes
    mode = CODED if fits else RAW
    header = HEADER.pack(MAGIC, target_bits.itemsize, mode, *layout, columns, target_bits.size)
    if fits:
        lengths = struct.pack(f"<{len(blocks)}I", *map(len, blocks))
        return Delta(b"".join([header, lengths, *blocks]), changed, Digest(*lanes))
    return Delta(header + target_bits.tobytes(), changed, Digest(*lanes))


def decode_patch(
    payload: bytes | memoryview, base_bits: Bits, *, threads: int | None = None
) -> Patch:
    """Decodes the changes that ``payload`` holds for ``base_bits``, uint[COUNT].

    Takes memory in proportion to the base only. Raises CorruptError for anything that is not a
    payload for a base of this length and width.
    """
    return _decode(payload, base_bits, threads=threads)[0]


def decode_moved(
    payload: bytes | memoryview,
    base_bits: Bits,
    name: str,
    *,
    start: int = 0,
    threads: int | None = None,
) -> tuple[Patch, Digest]:
    """`decode_patch` for elements ``start`` and on of the tensor ``name``, in one pass with what
    its model's digest gains."""
    patch, moved = _decode(payload, base_bits, threads=threads, name=name, start=start)
    return patch, moved


def advance(payload: bytes | memoryview, bits: Bits, *, threads: int | None = None) -> int:
    """Applies ``payload`` to ``bits``, uint[COUNT], in place; returns how many elements changed.

    Takes the memory of a few blocks. Raises CorruptError as `decode_patch` does; some blocks may
    then have been applied, so use it for payloads that were verified.
    """
    view = memoryview(payload).cast("B")
    header = _read_header(view, bits)
    if not bits.flags.writeable:
        raise InputError("the array to change is read-only")
    body = view[HEADER.size :]
    if header.mode == RAW:
        patch = _decode_raw(body, bits)
        bits[patch.positions] = patch.bits
        return len(patch)
    lengths, rest = split_blocks(body, bits.size, header.columns)
    try:
        return _native.advance(
            rest, lengths, bits, header.columns, *header.layout, threads or cores()
        )
    except ValueError as error:
        raise CorruptError(str(error)) from error


def _read_header(view: memoryview, base_bits: Bits) -> _Header:
    if len(view) < HEADER.size:
        raise CorruptError("the delta is shorter than its header")
    magic, itemsize, mode, mantissa, exponent, columns, count = HEADER.unpack_from(view)
    layout = Layout(mantissa, exponent)
    if magic != MAGIC or mode not in (CODED, RAW):
        raise CorruptError("the payload is not a delta")
    if itemsize != base_bits.itemsize or count != base_bits.size:
        raise CorruptError(
            f"a delta for {count} elements of {itemsize} bytes, "
            f"not {base_bits.size} of {base_bits.itemsize}"
        )
    if layout != INTEGER and layout not in LAYOUTS.values():
        raise CorruptError(f"a delta has the unknown layout {tuple(layout)}")
    if layout != INTEGER and mantissa + exponent + 1 != 8 * itemsize:
        raise CorruptError("a delta's layout does not fit the width of its elements")
    if columns == 1 or columns > _native.BLOCK:
        raise CorruptError(f"a delta has rows of {columns} elements")
    return _Header(mode, layout, columns)


def _decode_raw(body: memoryview, base_bits: Bits) -> Patch:
    if len(body) != base_bits.nbytes:
        raise CorruptError("a raw delta differs in length from its base")
    return diff(base_bits, np.require(np.frombuffer(body, base_bits.dtype), requirements="A"))


def split_blocks(body: memoryview, count: int, columns: int) -> tuple[NDArray[np.uint32], Bits]:
    """Returns the lengths of a coded payload's blocks, and their bytes, of a base of ``count``
    elements; raises CorruptError if the lengths are incomplete."""
    blocks = -(-count // block_elements(columns))
    at = blocks * LENGTH.itemsize
    if len(body) < at:
        raise CorruptError("a delta ends within its lengths")
    lengths = np.frombuffer(body[:at], LENGTH).astype(np.uint32)
    return lengths, np.frombuffer(body[at:], np.uint8)


def _decode(
    payload: bytes | memoryview,
    base_bits: Bits,
    *,
    threads: int | None,
    name: str | None = None,
    start: int = 0,
) -> tuple[Patch, Digest]:
    view = memoryview(payload).cast("B")
    header = _read_header(view, base_bits)
    body = view[HEADER.size :]
    if header.mode == RAW:
        patch = _decode_raw(body, base_bits)
        moved = (
            ZERO
            if name is None
            else digest_patch(name, patch, base_bits[patch.positions], start=start)
        )
        return patch, moved
    lengths, rest = split_blocks(body, base_bits.size, header.columns)
    key = None if name is None else tensor_key(name)
    try:
        positions, bits, *lanes = _native.decode(
            rest, lengths, base_bits, header.columns, *header.layout,
            0, lengths.size, key, start, threads or cores(),
        )  # fmt: skip
    except ValueError as error:
        raise CorruptError(str(error)) from error
    return Patch(positions, bits), Digest(*lanes)
