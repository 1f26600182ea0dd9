"""The codec of the independent reader (`deltawire.testing.reader`), from the document alone."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

M = 1 << 15


class FormatError(ValueError):
    """An object that breaks a rule of the format."""


def require(condition: bool, what: str) -> None:
    """Raises `FormatError` unless ``condition`` holds."""
    if not condition:
        raise FormatError(what)


class ByteReader:
    """Takes bytes and numbers from the front of ``data``."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        require(self.at + size <= len(self.data), "the bytes end too soon")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        """A little-endian number of ``size`` bytes."""
        return int.from_bytes(self.take(size), "little")

    def varint(self) -> int:
        """Seven bits a byte, the lowest first; the highest bit says that another byte follows."""
        value = 0
        for shift in range(0, 56, 7):
            byte = self.number(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise FormatError("a number of more than eight bytes")

    def rest(self) -> bytes:
        """Everything that is left."""
        return self.take(len(self.data) - self.at)

    def odds(self) -> list[int]:
        """The odds of a yes in each of the 16 contexts."""
        mask, odds = self.number(2), [0] * 16
        for context in range(16):
            if mask >> context & 1:
                level = self.number(1)
                size = level & 127
                require(1 <= size <= 96, "a level that is refused")
                part = size if size < 8 else (8 + size % 8) << size // 8 - 1
                odds[context] = M - part if level & 128 else part
        return odds


class Planes:
    """Decisions, read in the opposite order to that of writing."""

    def __init__(self, data: bytes, lanes: int) -> None:
        split = len(data) - 4 * lanes
        require(split >= 0 and split % 2 == 0, "no room for the states")
        self.lanes = lanes
        self.words = list(struct.unpack(f"<{split // 2}H", data[:split]))
        self.states = list(struct.unpack(f"<{lanes}I", data[split:]))
        require(all(M <= x < 1 << 31 for x in self.states), "a state out of bounds")

    def take(
        self, contexts: Sequence[int], odds: list[int], start: int = 0, end: int | None = None
    ) -> list[int]:
        """Decisions ``start`` to ``end`` of a plane, the last one first."""
        end = len(contexts) if end is None else end
        bits = [0] * (end - start)
        if not any(odds):
            return bits
        states, words, lanes = self.states, self.words, self.lanes
        for i in range(end - 1, start - 1, -1):
            x, zeros = states[i % lanes], M - odds[contexts[i]]
            slot = x & M - 1
            if slot >= zeros:
                bits[i - start] = 1
                x = (M - zeros) * (x >> 15) + slot - zeros
            else:
                x = zeros * (x >> 15) + slot
            if x < M:
                require(bool(words), "no words are left")
                x = x << 16 | words.pop()
            states[i % lanes] = x
        return bits

    def finish(self) -> None:
        """Requires that everything was read."""
        require(not self.words and all(x == M for x in self.states), "not all was read")


def lanes_of_codes(count: int, k: int) -> int:
    """Returns how many lanes code ``k`` changes of a block of ``count`` codes of 4 bits."""
    return 16 if count >= 1 << 20 or k >= 1024 else 1


def lanes_of(count: int) -> int:
    """Returns how many lanes code a block of ``count`` elements."""
    return 64 if count >= 1 << 20 else 16 if count >= 1 << 15 else 1


def unpack(data: bytes, widths: Iterable[int]) -> list[int]:
    """Numbers of so many bits each, packed the lowest bit first; nothing may be left but zeros
    that fill the last byte."""
    numbers, held, fill, at = [], 0, 0, 0
    for width in widths:
        while fill < width:
            require(at < len(data), "packed bits end too soon")
            held |= data[at] << fill
            at, fill = at + 1, fill + 8
        numbers.append(held & (1 << width) - 1)
        held, fill = held >> width, fill - width
    require(at == len(data) and held == 0, "packed bits are left")
    return numbers


def split_blocks(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The blocks after their lengths."""
    data = ByteReader(body)
    lengths = [data.number(4) for _ in sizes]
    blocks = [data.take(length) for length in lengths]
    require(not data.rest(), "bytes after the last block")
    return blocks


def sizes_of(count: int, block: int) -> list[int]:
    """The elements of each block."""
    return [min(block, count - at) for at in range(0, count, block)]


LAYOUTS = {(0, 0), (3, 4), (2, 5), (10, 5), (7, 8), (23, 8), (52, 11)}


def decode_delta(payload: bytes, base: Sequence[int], width: int) -> dict[int, int]:
    """The new bits of the elements that change, by their index in ``base``."""
    if payload[:4] == b"DWD2":
        return _decode_codes(payload, base, width)
    data = ByteReader(payload)
    require(data.take(4) == b"DWD1", "not a delta")
    size, mode, mantissa, exponent = data.take(4)
    columns, count = data.number(4), data.number(8)
    require(8 * size == width and count == len(base) and mode in (0, 1), "of another base")
    require((mantissa, exponent) in LAYOUTS, "an unknown layout")
    require(not exponent or mantissa + exponent + 1 == width, "a layout of another width")
    require(columns != 1 and columns <= 1 << 22, "no such rows")
    body = data.rest()
    if mode == 1:
        require(len(body) == count * size, "a raw delta of another length")
        fresh = [body[i : i + size] for i in range(0, len(body), size)]
        bits = [int.from_bytes(each, "little") for each in fresh]
        return {i: new for i, (old, new) in enumerate(zip(base, bits, strict=True)) if old != new}
    return _decode_blocks(body, base, width, (mantissa, exponent), columns)


def _decode_codes(payload: bytes, base: Sequence[int], width: int) -> dict[int, int]:
    data = ByteReader(payload[4:])
    size, mode, *kind = data.take(4)
    columns, count, each = data.number(4), data.number(8), width // 4
    require(8 * size == width and count == len(base) and mode == 0, "of another base")
    require(kind in ([0, 4], [1, 2]), "an unknown kind of codes")
    require(columns % each == 0 and columns <= 1 << 22, "no such rows")
    codes = [element >> 4 * place & 15 for element in base for place in range(each)]
    floats = kind == [1, 2]
    numbers = [c if not floats else c + 8 if c < 8 else 15 - c for c in codes]
    changed: dict[int, int] = {}
    for place, number in _decode_blocks(data.rest(), numbers, 8, (0, 4), columns).items():
        require(number < 16, "a code of more than four bits")
        code = number if not floats else number - 8 if number >= 8 else 15 - number
        element, shift = place // each, 4 * (place % each)
        held = changed.get(element, base[element])
        changed[element] = held & ~(15 << shift) | code << shift
    return changed


def _decode_blocks(
    body: bytes, base: Sequence[int], width: int, layout: tuple[int, int], columns: int
) -> dict[int, int]:
    block = columns * ((1 << 22) // columns) if columns else 1 << 22
    changed, first = {}, 0
    sizes = sizes_of(len(base), block)
    for each, here in zip(split_blocks(body, sizes), sizes, strict=True):
        old = base[first : first + here]
        for place, bits in _decode_block(each, old, width, layout, columns):
            changed[first + place] = bits
        first += here
    return changed


def _decode_block(
    block: bytes, base: Sequence[int], width: int, layout: tuple[int, int], columns: int
) -> list[tuple[int, int]]:
    data, (mantissa, exponent) = ByteReader(block), layout
    k = data.number(4)
    require(k <= len(base), "more changes than elements")
    if k == 0:
        require(not data.rest(), "bytes after an empty block")
        return []
    top, planes = data.number(2), data.number(1)
    require(top >> exponent == 0 and planes < width, "a header out of bounds")
    flags = data.odds()
    require(not flags[0], "changes of elements above the largest exponent that changes")
    of_lengths = [data.odds() for _ in range(planes)]
    details, signs = data.odds(), data.odds()
    raw = data.take(data.number(4))
    lanes = lanes_of_codes(len(base), k) if layout == (0, 4) else lanes_of(len(base))
    reader = Planes(data.rest(), lanes)
    mask = (1 << exponent) - 1
    classes = [min(max(top + 1 - (old >> mantissa & mask), 0), 15) for old in base]
    places = [i for i, bit in enumerate(reader.take(classes, flags)) if bit]
    require(len(places) == k, "another number of changes")
    lengths = dict.fromkeys(places, 1)
    for b, odds in enumerate(of_lengths, start=1):
        among = [i for i in places if lengths[i] >= b]
        for i, bit in zip(among, reader.take([classes[i] for i in among], odds), strict=True):
            lengths[i] += bit
    longer = [i for i in places if lengths[i] > 1]
    seconds = reader.take([min(lengths[i], 15) for i in longer], details)
    rests = unpack(raw, [lengths[i] - 2 for i in longer])
    magnitudes = dict.fromkeys(places, 1)
    for i, second, rest in zip(longer, seconds, rests, strict=True):
        magnitudes[i] = (2 | second) << lengths[i] - 2 | rest
        require(magnitudes[i] <= 1 << width - 1, "a change of more than half of all values")
    falls = _decode_signs(reader, signs, places, columns)
    reader.finish()
    fresh = []
    for i, fall in zip(places, falls, strict=True):
        step = -magnitudes[i] if fall else magnitudes[i]
        moved = (_ordered(base[i], width, exponent) + step) % (1 << width)
        fresh.append((i, _unordered(moved, width, exponent)))
    return fresh


def _decode_signs(reader: Planes, odds: list[int], places: list[int], columns: int) -> list[int]:
    counts: dict[int, int] = {}
    falls = [0] * len(places)
    for start in range((len(places) - 1) // reader.lanes * reader.lanes, -1, -reader.lanes):
        step = range(start, min(start + reader.lanes, len(places)))
        held = [counts.get(places[i] % columns, 0) if columns else 0 for i in step]
        contexts = [0] * start + [min(abs(count), 7) for count in held]
        bits = reader.take(contexts, odds, start, step.stop)
        for i, bit, count in zip(step, bits, held, strict=True):
            falls[i] = bit ^ (count < 0)
        for i in step if columns else ():
            column = places[i] % columns
            moved = counts.get(column, 0) + (-1 if falls[i] else 1)
            counts[column] = min(max(moved, -15), 15)
    return falls


def _ordered(bits: int, width: int, exponent: int) -> int:
    sign = 1 << width - 1
    if not exponent:
        return bits
    return bits ^ (2 * sign - 1) if bits & sign else bits | sign


def _unordered(place: int, width: int, exponent: int) -> int:
    sign = 1 << width - 1
    if not exponent:
        return place
    return place & ~sign if place & sign else place ^ (2 * sign - 1)


def decode_anchor(payload: bytes, count: int, width: int) -> list[int]:
    """The bits of every element of a piece of an anchor."""
    data = ByteReader(payload)
    require(data.take(4) == b"DWA1", "not an anchor")
    size, mode, low, field = data.take(4)
    require(8 * size == width and data.number(8) == count and mode in (0, 1), "of another piece")
    require(1 <= field <= 8 and low + field <= width, "no such field")
    body = data.rest()
    if mode == 1:
        require(len(body) == count * size, "a raw anchor of another length")
        return [int.from_bytes(body[i : i + size], "little") for i in range(0, len(body), size)]
    sizes = sizes_of(count, 1 << 20)
    elements: list[int] = []
    for block, here in zip(split_blocks(body, sizes), sizes, strict=True):
        elements += _decode_whole(block, here, width, low, field)
    return elements


def _decode_whole(block: bytes, count: int, width: int, low: int, field: int) -> list[int]:
    data = ByteReader(block)
    symbols = data.take(data.number(1))
    require(len(symbols) <= 15 and all(s >> field == 0 for s in symbols), "no such symbols")
    require(len(set(symbols)) == len(symbols), "a symbol is listed twice")
    planes = [data.odds() for _ in range(4)]
    escapes = data.take(data.number(4))
    rest_width = width - field
    rests = unpack(data.take(-(-count * rest_width // 8)), [rest_width] * count)
    reader = Planes(data.rest(), lanes_of(count))
    ranks = [0] * count
    for plane in (3, 2, 1, 0):
        bits = reader.take([rank >> plane + 1 for rank in ranks], planes[plane])
        ranks = [rank | bit << plane for rank, bit in zip(ranks, bits, strict=True)]
    reader.finish()
    strange = iter(unpack(escapes, [field] * ranks.count(15)))
    require(all(rank == 15 or rank < len(symbols) for rank in ranks), "a rank without a symbol")
    elements = []
    for rank, rest in zip(ranks, rests, strict=True):
        symbol = next(strange) if rank == 15 else symbols[rank]
        below, above = rest & (1 << low) - 1, rest >> low
        elements.append(above << low + field | symbol << low | below)
    return elements
