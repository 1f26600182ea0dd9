"""The coding of a whole tensor or piece: byte planes, each packed where that is smaller.

| bytes | what |
|---|---|
| 2 | magic ``fb`` |
| 1 | version, 1 |
| 1 | itemsize |
| 4 | packed: a bit for each section that is zlib |
| 8 | count of elements |
| … | lengths and sections: one byte plane for each byte of an element (see ``sections``) |
"""

from __future__ import annotations

import struct

from deltawire.codec.dtypes import Bits, require_bits, unsigned
from deltawire.codec.sections import SectionReader, pack, planes, take_planes
from deltawire.errors import CorruptError

MAGIC = b"fb"
VERSION = 1

_HEADER = struct.Struct("<2sBBIQ")


def encode_full(bits: Bits) -> bytes:
    """Code ``bits``, uint[COUNT]: never more than their raw bytes and 16.

    Raises InputError if they are not contiguous bits.
    """
    require_bits(bits)
    packed, buffers = pack(planes(bits))
    header = _HEADER.pack(MAGIC, VERSION, bits.dtype.itemsize, packed, bits.size)
    return b"".join([header, *buffers])


def decode_full(payload: bytes | memoryview, count: int, itemsize: int) -> Bits:
    """The bits that ``encode_full`` was given: uint[count] of ``itemsize`` bytes each.

    Takes memory in proportion to ``count``, whatever the payload says. Raises CorruptError if
    the payload is not one of ``count`` elements of ``itemsize`` bytes.
    """
    unsigned(itemsize)
    view = memoryview(payload).cast("B")
    if len(view) < _HEADER.size:
        raise CorruptError("the payload is shorter than its header")
    magic, version, its_itemsize, packed, its_count = _HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise CorruptError(f"the payload is no anchor of format {VERSION}")
    if its_itemsize != itemsize or its_count != count or packed >> itemsize:
        raise CorruptError(f"the payload is not one of {count} elements of {itemsize} bytes")
    reader = SectionReader(view[_HEADER.size :], packed)
    bits = take_planes(reader, count, itemsize)
    reader.finish()
    return bits
