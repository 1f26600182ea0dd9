"""Slow truth: the codec and the digest once more, each as plainly as it can be said.

The tests hold the fast ones equal to these, bit for bit and byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltawire._native import BLOCK
from deltawire.codec.delta import CLASSED, HEADER, LENGTH, MAGIC, RAW, Layout
from deltawire.codec.digest import STEP, Digest, tensor_key
from deltawire.codec.dtypes import Bits
from deltawire.codec.patch import Patch
from deltawire.errors import CorruptError

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def digest_bits_reference(name: str, bits: Bits, start: int = 0) -> Digest:
    """Equal to ``digest.digest_bits`` for ``bits``, uint[N]."""
    if bits.dtype.itemsize == 8:
        bits, start = bits.view(np.uint32), 2 * start
    units = np.arange(bits.size, dtype=np.uint64) + np.uint64(start + 1)
    x = units * np.uint64(STEP) + np.uint64(tensor_key(name))
    product = ((x & _LOW) ^ bits.astype(np.uint64)) * ((x >> _HALF) | np.uint64(1))
    folded = product ^ (product >> np.uint64(29))
    second = (folded & _LOW) * ((folded >> _HALF) ^ (x & _LOW))
    return Digest(int(folded.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64)))


CLASSES = 12
ESCAPE = 24
LARGEST_K = 30
HAS_LARGE = 0x10


class Rice:
    """A value v is q = v >> k zeros, a one, and the k low bits of v; at q = 24 and more, 24 zeros,
    a one, and all 64 bits. k follows a running mean, kept in 1/64."""

    def __init__(self, start: int) -> None:
        """``start`` is the byte that a block's line gives."""
        self.byte = start
        self.mean64 = mean_of_byte(start)

    def k(self) -> int:
        """The parameter for the next value."""
        return min(((self.mean64 + 32) * 1971 >> 18).bit_length(), LARGEST_K)

    def update(self, value: int) -> None:
        """Take a coded value into the mean."""
        self.mean64 += min(value, 1 << 40) - (self.mean64 >> 6)

    def write(self, bits: list[int], value: int) -> None:
        """Append a value's code."""
        k = self.k()
        if value >> k < ESCAPE:
            bits += [0] * (value >> k) + [1] + [value >> i & 1 for i in range(k)]
        else:
            bits += [0] * ESCAPE + [1] + [value >> i & 1 for i in range(64)]
        self.update(value)

    def read(self, bits: BitList) -> int:
        """Take a value's code."""
        k, zeros = self.k(), 0
        while zeros < ESCAPE and not bits.take(1):
            zeros += 1
        if zeros < ESCAPE:
            value = zeros << k | bits.take(k)
        else:
            bits.take(1)
            value = bits.take(64)
        self.update(value)
        return value


class BitList:
    """The bits of a stream, lowest of each byte first."""

    def __init__(self, data: bytes) -> None:
        self._bits = [byte >> i & 1 for byte in data for i in range(8)]
        self._at = 0

    def take(self, count: int) -> int:
        """The next ``count`` bits as an integer; raises CorruptError at the end."""
        if self._at + count > len(self._bits):
            raise CorruptError("a stream ends too soon")
        taken = self._bits[self._at : self._at + count]
        self._at += count
        return sum(bit << i for i, bit in enumerate(taken))


def mean_of_byte(byte: int) -> int:
    """A starting mean in 1/64: three bits behind the leading one, five of exponent."""
    return (8 + (byte & 7) << (byte >> 3)) >> 3


def byte_of_mean(total: int, count: int) -> int:
    """The smallest byte whose mean is not below total / count."""
    mean64 = min(total, 1 << 50) * 64 // count if count else 0
    return next((b for b in range(255) if mean_of_byte(b) >= mean64), 255) if count else 0


def ordered(value: int, width: int, layout: Layout) -> int:
    """The integer order of floats: -0 lies just below +0. Integers are their own."""
    sign = 1 << width - 1
    if not layout.exponent:
        return value
    return value ^ (2 * sign - 1) if value & sign else value | sign


def class_of(value: int, top: int, layout: Layout) -> int:
    """The class of an element by its old exponent."""
    exponent = value >> layout.mantissa & (1 << layout.exponent) - 1
    return min(max(top - exponent, 0), CLASSES - 1)


def encode_reference(base: Bits, target: Bits, layout: Layout) -> bytes:
    """Equal to ``delta.encode``."""
    blocks, changed = [], 0
    for start in range(0, base.size, BLOCK):
        old, new = base[start : start + BLOCK].tolist(), target[start : start + BLOCK].tolist()
        changed += sum(a != b for a, b in zip(old, new, strict=True))
        blocks.append(_encode_block(old, new, 8 * base.itemsize, layout))
    lengths = b"".join(LENGTH.pack(len(block)) for block in blocks)
    small = sum(map(len, blocks)) + len(lengths) < target.nbytes
    mode = CLASSED if small else RAW
    header = HEADER.pack(MAGIC, base.itemsize, mode, *layout, base.size, changed)
    return header + (lengths + b"".join(blocks) if small else target.tobytes())


def _encode_block(old: list[int], new: list[int], width: int, layout: Layout) -> bytes:
    moved = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    exponents = [old[i] >> layout.mantissa & (1 << layout.exponent) - 1 for i in moved]
    top = max(exponents, default=0)
    classes: dict[int, list[tuple[int, int, int]]] = {}
    seen, behind = [0] * CLASSES, [0] * CLASSES
    for before, after in zip(old, new, strict=True):
        number = class_of(before, top, layout)
        if before != after:
            step = (ordered(after, width, layout) - ordered(before, width, layout)) % (1 << width)
            falls = step >> width - 1
            size = (1 << width) - step if falls else step
            gap = seen[number] - behind[number]
            classes.setdefault(number, []).append((gap, falls, size - 1))
            behind[number] = seen[number] + 1
        seen[number] += 1
    lines, streams = b"", b""
    for number in sorted(classes):
        line, stream = _encode_class(number, classes[number])
        lines += line
        streams += stream
    return bytes([len(classes), top & 255, top >> 8]) + lines + streams


def _encode_class(number: int, changes: list[tuple[int, int, int]]) -> tuple[bytes, bytes]:
    large = [i for i, (_, _, excess) in enumerate(changes) if excess]
    extra = sum(min(changes[i][2] - 1, 1 << 40) for i in large)
    gap = Rice(byte_of_mean(sum(change[0] for change in changes), len(changes)))
    run = Rice(byte_of_mean(len(changes) - len(large), len(large) + 1))
    size = Rice(byte_of_mean(extra, len(large)))
    bits: list[int] = []
    ends = [*large, len(changes)]
    if large:
        run.write(bits, ends[0])
    for i, (distance, falls, excess) in enumerate(changes):
        gap.write(bits, distance)
        bits.append(falls)
        if excess:
            size.write(bits, excess - 1)
            if i + 1 < len(changes):
                run.write(bits, ends[ends.index(i) + 1] - i - 1)
    bits += [0] * (-len(bits) % 8)
    stream = bytes(
        sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)
    )
    starts = [gap.byte, run.byte, size.byte] if large else [gap.byte]
    line = bytes([number | (HAS_LARGE if large else 0), *starts])
    return line + _varint(len(changes)) + _varint(len(stream)), stream


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def decode_patch_reference(payload: bytes, base: Bits) -> Patch:
    """Equal to ``delta.decode_patch`` for payloads that `encode_reference` makes."""
    _, _, mode, mantissa, exponent, _, _ = HEADER.unpack_from(payload)
    body = payload[HEADER.size :]
    if mode == RAW:
        target = np.frombuffer(body, base.dtype)
        where = np.flatnonzero(target != base)
        return Patch(where.astype(np.int64), target[where])
    at = LENGTH.size * -(-base.size // BLOCK)
    found: list[tuple[int, int]] = []
    for number, start in enumerate(range(0, base.size, BLOCK)):
        (length,) = LENGTH.unpack_from(body, LENGTH.size * number)
        old = base[start : start + BLOCK].tolist()
        changes = _decode_block(
            body[at : at + length], old, 8 * base.itemsize, Layout(mantissa, exponent)
        )
        found += [(start + i, value) for i, value in changes]
        at += length
    positions = np.array([i for i, _ in found], np.int64)
    return Patch(positions, np.array([value for _, value in found], base.dtype))


def _decode_block(
    block: bytes, old: Sequence[int], width: int, layout: Layout
) -> list[tuple[int, int]]:
    actives, top, at = block[0], block[1] | block[2] << 8, 3
    lines = []
    for _ in range(actives):
        number, large = block[at] & 15, bool(block[at] & HAS_LARGE)
        starts = list(block[at + 1 : at + (4 if large else 2)])
        at += 1 + len(starts)
        count, at = _read_varint(block, at)
        length, at = _read_varint(block, at)
        lines.append((number, large, starts, count, length))
    changes = []
    for number, large, starts, count, length in lines:
        members = [i for i, value in enumerate(old) if class_of(value, top, layout) == number]
        bits = BitList(block[at : at + length])
        at += length
        moves = _decode_class(bits, large, starts, count)
        for rank, falls, excess in moves:
            value = old[members[rank]]
            step = -(excess + 1) if falls else excess + 1
            new = (ordered(value, width, layout) + step) % (1 << width)
            changes.append((members[rank], _unordered(new, width, layout)))
    return sorted(changes)


def _decode_class(
    bits: BitList, large: bool, starts: list[int], count: int
) -> list[tuple[int, int, int]]:
    gap = Rice(starts[0])
    run, size = (Rice(starts[1]), Rice(starts[2])) if large else (None, None)
    units = run.read(bits) if run else count
    moves, rank = [], -1
    for i in range(count):
        rank += 1 + gap.read(bits)
        falls, excess = bits.take(1), 0
        if size and run and units == 0:
            excess = 1 + size.read(bits)
            if i + 1 < count:
                units = run.read(bits)
        else:
            units -= 1
        moves.append((rank, falls, excess))
    return moves


def _unordered(value: int, width: int, layout: Layout) -> int:
    sign = 1 << width - 1
    if not layout.exponent:
        return value
    return value & ~sign if value & sign else value ^ (2 * sign - 1)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
