"""The part of a payload after its header: byte sections, each raw or, where smaller, zlib.

A bit per section in the header's ``packed`` says which are zlib; the lengths of those follow the
header as little-endian uint64, in order. The length of a raw section, and the unpacked length of
a packed one, follow from what the reader knows, so that a payload never chooses how much memory
it takes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from deltawire.codec.dtypes import Bits, unsigned
from deltawire.errors import CorruptError

Bytes = NDArray[np.uint8]

_LENGTH = struct.Struct("<Q")
_LEVEL = 1


def pack(sections: Iterable[Bytes]) -> tuple[int, list[bytes | memoryview]]:
    """The ``packed`` bits for contiguous uint8 ``sections``, and the buffers after the header."""
    packed, lengths, bodies = 0, list[bytes | memoryview](), list[bytes | memoryview]()
    for number, section in enumerate(sections):
        body: bytes | memoryview = section.data
        squeezed = _squeeze(section)
        if len(squeezed) + _LENGTH.size < section.size:
            packed |= 1 << number
            lengths.append(_LENGTH.pack(len(squeezed)))
            body = squeezed
        bodies.append(body)
    return packed, lengths + bodies


def _squeeze(section: Bytes) -> bytes:
    """zlib without matches: gaps and planes hardly repeat, and Huffman codes alone are faster."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    return stream.compress(section.data) + stream.flush()


class SectionReader:
    """Takes a payload's sections in order, and trusts none of them."""

    def __init__(self, payload: memoryview, packed: int) -> None:
        """``payload`` starts after the header. Raises CorruptError if it has not all lengths."""
        self._packed = packed
        self._lengths: dict[int, int] = {}
        self._number = 0
        numbers = [number for number in range(packed.bit_length()) if packed >> number & 1]
        at = len(numbers) * _LENGTH.size
        if len(payload) < at:
            raise CorruptError("the payload ends within its lengths")
        for number, (length,) in zip(numbers, _LENGTH.iter_unpack(payload[:at]), strict=True):
            self._lengths[number] = length
        self._rest = payload[at:]

    def take(self, size: int) -> Bytes:
        """The next section, uint8[size]. Raises CorruptError if that is not what it holds."""
        stored = self._lengths.pop(self._number, None)
        self._number += 1
        if stored is not None and stored + _LENGTH.size >= size:
            raise CorruptError(f"a section of {size} bytes is stored in {stored}")
        body = self._slice(size if stored is None else stored)
        if stored is None:
            return np.frombuffer(body, np.uint8)
        unpacker = zlib.decompressobj()
        try:
            # One byte more than allowed, because only then does zlib look for its end mark.
            section = unpacker.decompress(body, size + 1)
        except zlib.error as error:
            raise CorruptError(f"a section does not unpack: {error}") from None
        if len(section) != size or not unpacker.eof or unpacker.unused_data:
            raise CorruptError(f"a section does not unpack to {size} bytes")
        return np.frombuffer(section, np.uint8)

    def finish(self) -> None:
        """Raise CorruptError if anything is left."""
        if self._rest or self._lengths:
            raise CorruptError("the payload goes on after its last section")

    def _slice(self, size: int) -> memoryview:
        if len(self._rest) < size:
            raise CorruptError("the payload ends within a section")
        body, self._rest = self._rest[:size], self._rest[size:]
        return body


def planes(bits: Bits) -> Iterable[Bytes]:
    """Byte 0 of every element of ``bits``, uint[N], then byte 1 of each, and so on: uint8[N]."""
    by_element = bits.view(np.uint8).reshape(-1, bits.dtype.itemsize)
    for plane in range(bits.dtype.itemsize):
        yield np.ascontiguousarray(by_element[:, plane])


def take_planes(reader: SectionReader, count: int, itemsize: int) -> Bits:
    """The next ``itemsize`` sections put together again: uint[count]."""
    # The first plane is taken before memory for all of them, because a short payload ends there.
    first = reader.take(count)
    bits = np.empty(count, unsigned(itemsize))
    by_element = bits.view(np.uint8).reshape(-1, itemsize)
    by_element[:, 0] = first
    for plane in range(1, itemsize):
        by_element[:, plane] = reader.take(count)
    return bits
