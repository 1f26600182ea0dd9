"""Implements codec and digest again, slowly and clearly.

Tests hold the fast implementations equal to it, byte for byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltawire._native import BLOCK, WHOLE_BLOCK
from deltawire.codec import anchors, packed
from deltawire.codec.anchors import Field, field_of
from deltawire.codec.delta import (
    CODED,
    HEADER,
    LENGTH,
    MAGIC,
    RAW,
    Layout,
    block_elements,
)
from deltawire.codec.digest import STEP, Digest, tensor_key
from deltawire.codec.dtypes import Bits, unsigned
from deltawire.codec.patch import Patch
from deltawire.errors import CorruptError

Ints = NDArray[np.int64]

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


def digest_rounded_reference(name: str, values: NDArray[np.float32], start: int = 0) -> Digest:
    """Equal to ``digest.digest_rounded`` for numbers, float32[N]."""
    bits = values.view(np.uint32).astype(np.uint64)
    odd = (bits >> np.uint64(16)) & np.uint64(1)
    rounded = (bits + np.uint64(0x7FFF) + odd) >> np.uint64(16)
    return digest_bits_reference(name, rounded.astype(np.uint16), start)


CONTEXTS = 16
CERTAIN = 1 << 15
LOWEST = 1 << 15
GROUP = 64
SAMPLED = 2048
MEMORY_LIMIT = 15
LAST_SIGN_CONTEXT = 7
RANKS = 15
PLANES = 4


def lanes_for(count: int) -> int:
    """Returns the number of lanes that code a block of ``count`` elements."""
    return 64 if count >= 1 << 20 else 16 if count >= 1 << 15 else 1


def small_lanes_for(count: int, changes: int) -> int:
    """Returns the number of lanes that code ``changes`` of a block of ``count`` codes of 4 bits."""
    return 16 if count >= 1 << 20 or changes >= 1024 else 1


def odds_of(level: int) -> int:
    """Returns the odds, in parts of 2^15, that a level stands for."""
    size = level & 0x7F
    odds = size if size < 8 else (8 + (size & 7)) << (size >> 3) - 1
    return CERTAIN - odds if level & 0x80 else odds


def level_of(ones: int, total: int) -> int:
    """Returns the level for ``ones`` of ``total``: 0 for none."""
    if ones == 0:
        return 0
    scaled = (ones * CERTAIN + total // 2) // total
    flip = 0x80 if scaled > CERTAIN // 2 else 0
    odds = max(CERTAIN - scaled if flip else scaled, 1)
    if odds < 8:
        return odds | flip
    exponent = odds.bit_length() - 4
    rounded = odds + (1 << exponent >> 1) >> exponent
    return (exponent + 1 << 3) + rounded - 8 | flip


class Odds:
    """A level for each context, and the odds of a one that they stand for."""

    def __init__(self, levels: list[int]) -> None:
        self.levels = levels
        self.ones = np.array([odds_of(level) for level in levels], np.int64)

    @classmethod
    def of(cls, contexts: Ints, bits: Ints) -> Odds:
        """Computes the odds from one plane's counts."""
        total = np.bincount(contexts, minlength=CONTEXTS)
        ones = np.bincount(contexts, bits, CONTEXTS).astype(np.int64)
        return cls([level_of(int(a), int(b)) for a, b in zip(ones, total, strict=True)])

    def write(self) -> bytes:
        """Returns a mask of the contexts in use, two bytes, and their levels."""
        used = [c for c, level in enumerate(self.levels) if level]
        mask = sum(1 << c for c in used)
        return mask.to_bytes(2, "little") + bytes(self.levels[c] for c in used)


class PlaneWriter:
    """Planes of bits into words of 16 bits, upwards."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.states = np.full(lanes, LOWEST, np.int64)
        self.words: list[int] = []

    def put(self, contexts: Ints, bits: Ints, odds: Odds) -> None:
        """Writes a whole plane."""
        for start in range(0, len(bits), self.lanes):
            bit = bits[start : start + self.lanes] == 1
            x = self.states[: len(bit)]
            ones = odds.ones[contexts[start : start + self.lanes]]
            odds_here = np.where(bit, ones, CERTAIN - ones)
            over = x >= odds_here << 16
            self.words += (x[over] & 0xFFFF).tolist()
            x[over] >>= 16
            quotient, rest = np.divmod(x, odds_here)
            x[:] = (quotient << 15) + rest + np.where(bit, CERTAIN - ones, 0)

    def finish(self) -> bytes:
        """Returns the words, then the states."""
        words = np.array(self.words, "<u2").tobytes()
        return words + self.states.astype("<u4").tobytes()


class PlaneReader:
    """Reads the output of `PlaneWriter`, last decision first."""

    def __init__(self, data: bytes, lanes: int) -> None:
        split = len(data) - 4 * lanes
        if split < 0 or split % 2:
            raise CorruptError("a block without the states of its lanes")
        self.lanes = lanes
        self.states = np.frombuffer(data[split:], "<u4").astype(np.int64)
        self.words = np.frombuffer(data[:split], "<u2").astype(np.int64).tolist()
        if (self.states < LOWEST).any() or (self.states >= 1 << 31).any():
            raise CorruptError("a state out of bounds")

    def take(self, contexts: Ints, odds: Odds) -> Ints:
        """Reads a whole plane, one decision per context."""
        bits = np.zeros(len(contexts), np.int64)
        for start in reversed(range(0, len(contexts), self.lanes)):
            bits[start : start + self.lanes] = self.step(contexts[start : start + self.lanes], odds)
        return bits

    def step(self, contexts: Ints, odds: Odds) -> Ints:
        """Reads one decision of each of the first lanes."""
        x = self.states[: len(contexts)]
        zeros = CERTAIN - odds.ones[contexts]
        slot = x & CERTAIN - 1
        bit = slot >= zeros
        x[:] = np.where(bit, CERTAIN - zeros, zeros) * (x >> 15) + slot - np.where(bit, zeros, 0)
        for lane in reversed(np.flatnonzero(x < LOWEST)):
            if not self.words:
                raise CorruptError("a block ends too soon")
            x[lane] = x[lane] << 16 | self.words.pop()
        return bit.astype(np.int64)

    def finish(self) -> None:
        """Raises CorruptError unless everything has been read."""
        if self.words or (self.states != LOWEST).any():
            raise CorruptError("a block is longer than its planes")


class Bytes:
    """The bytes of a block, taken from the front."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def take(self, size: int) -> bytes:
        """Reads the next ``size`` bytes."""
        if size > len(self.rest):
            raise CorruptError("a block ends within its header")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def number(self, size: int) -> int:
        """Reads a little-endian number of ``size`` bytes."""
        return int.from_bytes(self.take(size), "little")

    def odds(self) -> Odds:
        """Reads the output of `Odds.write`."""
        mask = self.number(2)
        return Odds([self.take(1)[0] if mask >> c & 1 else 0 for c in range(CONTEXTS)])


def pack(numbers: list[tuple[int, int]]) -> bytes:
    """Packs numbers of the given bit widths one after another, the lowest bit first."""
    whole = fill = 0
    for number, width in numbers:
        whole |= number << fill
        fill += width
    return whole.to_bytes(-(-fill // 8), "little")


def unpack(data: bytes, widths: list[int]) -> list[int]:
    """Reads the output of `pack`."""
    whole, numbers = int.from_bytes(data, "little"), []
    for width in widths:
        numbers.append(whole & (1 << width) - 1)
        whole >>= width
    return numbers


def ordered(value: int, width: int, layout: Layout) -> int:
    """Maps floats to integers of the same order, -0 just below +0; integers map to themselves."""
    sign = 1 << width - 1
    if not layout.exponent:
        return value
    return value ^ (2 * sign - 1) if value & sign else value | sign


def unordered(value: int, width: int, layout: Layout) -> int:
    """Inverts `ordered`."""
    sign = 1 << width - 1
    if not layout.exponent:
        return value
    return value & ~sign if value & sign else value ^ (2 * sign - 1)


def classes_of(base: Bits, top: int, layout: Layout) -> Ints:
    """Returns each element's class: 0 above the exponent ``top``, one more per exponent below."""
    mask = base.dtype.type((1 << layout.exponent) - 1)
    exponent = (base >> base.dtype.type(layout.mantissa) & mask).astype(np.int64)
    return np.clip(top + 1 - exponent, 0, CONTEXTS - 1)


class SignMemory:
    """Remembers the direction in which each column moved, and derives the context of each sign from
    it.
    """

    def __init__(self, positions: Ints, columns: int) -> None:
        self.places = positions % columns if columns else None
        self.held = [0] * columns

    def expect(self, step: range) -> tuple[Ints, Ints]:
        """Returns the contexts of a step of changes, and whether each is expected to fall."""
        if self.places is None:
            return np.zeros(len(step), np.int64), np.zeros(len(step), np.int64)
        held = np.array([self.held[self.places[k]] for k in step], np.int64)
        return np.minimum(np.abs(held), LAST_SIGN_CONTEXT), (held < 0).astype(np.int64)

    def learn(self, step: range, falls: Ints) -> None:
        """Records the step's signs."""
        if self.places is None:
            return
        for k, fall in zip(step, falls.tolist(), strict=True):
            moved = self.held[self.places[k]] + 1 - 2 * fall
            self.held[self.places[k]] = min(max(moved, -MEMORY_LIMIT), MEMORY_LIMIT)


def encode_reference(base: Bits, target: Bits, layout: Layout, columns: int = 0) -> bytes:
    """Equal to ``delta.encode``'s payload."""
    size = block_elements(columns)
    blocks = [
        _encode_block(base[i : i + size], target[i : i + size], layout, columns)
        for i in range(0, base.size, size)
    ]
    lengths = np.array([len(block) for block in blocks], LENGTH).tobytes()
    body = lengths + b"".join(blocks)
    mode = CODED if len(body) < target.nbytes else RAW
    header = HEADER.pack(MAGIC, base.itemsize, mode, *layout, columns, base.size)
    return header + (body if mode == CODED else target.tobytes())


def _lanes(count: int, changes: int, layout: Layout) -> int:
    return small_lanes_for(count, changes) if layout == packed.INTEGERS else lanes_for(count)


def small_numbers(bits: Bits, codes: Layout) -> Bits:
    """Returns the 4-bit codes of elements as numbers in the order of their values, one a byte."""
    each = 2 * bits.itemsize
    found = []
    for element in bits.tolist():
        for place in range(each):
            code = element >> 4 * place & 15
            found.append(code if codes == packed.INTEGERS else _ordered_e2m1(code))
    return np.array(found, np.uint8)


def _ordered_e2m1(code: int) -> int:
    """Maps a sign, two bits of exponent and one of mantissa to integers of the same order, -0 just
    below +0."""
    return code + 8 if code < 8 else 15 - code


def _unordered_e2m1(number: int) -> int:
    """Inverts `_ordered_e2m1`."""
    return number - 8 if number >= 8 else 15 - number


def encode_packed_reference(base: Bits, target: Bits, codes: Layout, columns: int = 0) -> bytes:
    """Equal to ``packed.encode_packed``; ``columns`` counts elements."""
    columns *= 2 * base.itemsize
    columns = 0 if columns > BLOCK else columns
    size = block_elements(columns)
    old, new = small_numbers(base, codes), small_numbers(target, codes)
    blocks = [
        _encode_block(old[i : i + size], new[i : i + size], packed.INTEGERS, columns)
        for i in range(0, old.size, size)
    ]
    lengths = np.array([len(block) for block in blocks], LENGTH).tobytes()
    header = HEADER.pack(packed.MAGIC, base.itemsize, CODED, *codes, columns, base.size)
    return header + lengths + b"".join(blocks)


def decode_packed_reference(payload: bytes, base: Bits) -> Patch:
    """Equal to ``packed.decode_packed``."""
    _, _, _, mantissa, exponent, columns, _ = HEADER.unpack_from(payload)
    codes, each = Layout(mantissa, exponent), 2 * base.itemsize
    old = small_numbers(base, codes)
    size = block_elements(columns)
    count = -(-old.size // size)
    lengths = np.frombuffer(payload, LENGTH, count, HEADER.size)
    at, changed = HEADER.size + LENGTH.itemsize * count, dict[int, int]()
    for number, length in enumerate(lengths.tolist()):
        first = number * size
        where, what = _decode_block(
            payload[at : at + length], old[first : first + size], packed.INTEGERS, columns
        )
        at += length
        for place, value in zip((first + where).tolist(), what.tolist(), strict=True):
            if value > 15:
                raise CorruptError("a code of more than 4 bits")
            code = value if codes == packed.INTEGERS else _unordered_e2m1(value)
            element, shift = place // each, 4 * (place % each)
            held = changed.get(element, int(base[element]))
            changed[element] = held & ~(15 << shift) | code << shift
    positions = np.array(sorted(changed), np.int64)
    bits = np.array([changed[one] for one in sorted(changed)], base.dtype)
    return Patch(positions, bits)


def _encode_block(base: Bits, target: Bits, layout: Layout, columns: int) -> bytes:
    changed = (base != target).astype(np.int64)
    positions = np.flatnonzero(changed)
    head = len(positions).to_bytes(4, "little")
    if not len(positions):
        return head
    width, lanes = 8 * base.itemsize, _lanes(base.size, len(positions), layout)
    exponents = base[positions] >> base.dtype.type(layout.mantissa)
    top = int(np.max(exponents & base.dtype.type((1 << layout.exponent) - 1)))
    every = classes_of(base, top, layout)
    classes = every[positions]
    steps = [
        (ordered(int(b), width, layout) - ordered(int(a), width, layout)) % (1 << width)
        for a, b in zip(base[positions], target[positions], strict=True)
    ]
    falls = np.array([step >> width - 1 for step in steps], np.int64)
    magnitudes = [(1 << width) - step if step >> width - 1 else step for step in steps]
    lengths = np.array([magnitude.bit_length() for magnitude in magnitudes], np.int64)
    writer = PlaneWriter(lanes)
    signs = _put_signs(writer, falls, positions, columns)
    longer = [(m, m.bit_length()) for m in magnitudes if m > 1]
    details = _put(
        writer,
        [min(length, CONTEXTS - 1) for _, length in longer],
        [m >> length - 2 & 1 for m, length in longer],
    )
    raw = pack([(m & (1 << length - 2) - 1, length - 2) for m, length in longer])
    planes = []
    for bound in range(int(lengths.max()) - 1, 0, -1):
        among = lengths >= bound
        planes.append(_put(writer, classes[among], lengths[among] > bound))
    flags = _flag_odds(every, changed)
    writer.put(every, changed, flags)
    head += top.to_bytes(2, "little") + bytes([len(planes)]) + flags.write()
    head += b"".join(odds.write() for odds in reversed(planes)) + details.write() + signs.write()
    return head + len(raw).to_bytes(4, "little") + raw + writer.finish()


def _put(writer: PlaneWriter, contexts: object, bits: object) -> Odds:
    its_contexts, its_bits = np.array(contexts, np.int64), np.array(bits, np.int64)
    odds = Odds.of(its_contexts, its_bits)
    writer.put(its_contexts, its_bits, odds)
    return odds


def _put_signs(writer: PlaneWriter, falls: Ints, positions: Ints, columns: int) -> Odds:
    memory, contexts, bits = SignMemory(positions, columns), falls.copy(), falls.copy()
    for begin in reversed(range(0, len(falls), writer.lanes)):
        step = range(begin, min(begin + writer.lanes, len(falls)))
        place = slice(step.start, step.stop)
        contexts[place], expected = memory.expect(step)
        bits[place] = falls[place] ^ expected
        memory.learn(step, falls[place])
    return _put(writer, contexts, bits)


def _flag_odds(classes: Ints, changed: Ints) -> Odds:
    """Counts the elements of each class that do not change in some groups of 64 only."""
    groups = -(-len(classes) // GROUP)
    stride = 1 + groups // SAMPLED
    sampled = np.arange(len(classes)) // GROUP % stride == 0
    unchanged = np.bincount(classes[sampled & (changed == 0)], minlength=CONTEXTS)
    ones = np.bincount(classes[changed == 1], minlength=CONTEXTS)
    totals = ones + unchanged * stride + stride // 2
    pairs = zip(ones.tolist(), totals.tolist(), strict=True)
    return Odds([level_of(one, total) for one, total in pairs])


def decode_patch_reference(payload: bytes, base: Bits) -> Patch:
    """Equal to ``delta.decode_patch``."""
    _, _, mode, mantissa, exponent, columns, _ = HEADER.unpack_from(payload)
    body = payload[HEADER.size :]
    if mode == RAW:
        target = np.frombuffer(body, base.dtype)
        where = np.flatnonzero(target != base)
        return Patch(where.astype(np.int64), target[where])
    size = block_elements(columns)
    count = -(-base.size // size)
    lengths = np.frombuffer(body, LENGTH, count)
    at, positions, bits = LENGTH.itemsize * count, [np.empty(0, np.int64)], [base[:0]]
    for number, length in enumerate(lengths.tolist()):
        first = number * size
        where, what = _decode_block(
            body[at : at + length], base[first : first + size], Layout(mantissa, exponent), columns
        )
        positions.append(first + where)
        bits.append(what)
        at += length
    return Patch(np.concatenate(positions), np.concatenate(bits))


def _decode_block(block: bytes, base: Bits, layout: Layout, columns: int) -> tuple[Ints, Bits]:
    data = Bytes(block)
    total = data.number(4)
    if not total:
        return np.empty(0, np.int64), base[:0]
    width, lanes = 8 * base.itemsize, _lanes(base.size, total, layout)
    top, planes, flags = data.number(2), data.number(1), data.odds()
    if flags.ones[0]:
        raise CorruptError("changes of elements above the largest exponent that changes")
    of_lengths = [data.odds() for _ in range(planes)]
    details, signs = data.odds(), data.odds()
    raw = data.take(data.number(4))
    reader = PlaneReader(data.rest, lanes)
    every = classes_of(base, top, layout)
    positions = np.flatnonzero(reader.take(every, flags))
    classes, lengths = every[positions], np.ones(len(positions), np.int64)
    for bound, odds in enumerate(of_lengths, start=1):
        among = np.flatnonzero(lengths >= bound)
        lengths[among] += reader.take(classes[among], odds)
    magnitudes = [1] * len(positions)
    longer = np.flatnonzero(lengths > 1)
    high = reader.take(np.minimum(lengths[longer], CONTEXTS - 1), details)
    low = unpack(raw, (lengths[longer] - 2).tolist())
    for k, second, rest in zip(longer.tolist(), high.tolist(), low, strict=True):
        magnitudes[k] = (2 | second) << int(lengths[k]) - 2 | rest
        if magnitudes[k] > 1 << width - 1:
            raise CorruptError("a change of more than half of all values")
    falls = _take_signs(reader, signs, positions, columns)
    reader.finish()
    fresh = [
        unordered(
            (ordered(int(old), width, layout) + (-m if fall else m)) % (1 << width), width, layout
        )
        for old, m, fall in zip(base[positions], magnitudes, falls.tolist(), strict=True)
    ]
    return positions, np.array(fresh, base.dtype)


def _take_signs(reader: PlaneReader, odds: Odds, positions: Ints, columns: int) -> Ints:
    memory, falls = SignMemory(positions, columns), np.zeros(len(positions), np.int64)
    for begin in reversed(range(0, len(positions), reader.lanes)):
        step = range(begin, min(begin + reader.lanes, len(positions)))
        contexts, expected = memory.expect(step)
        falls[step.start : step.stop] = reader.step(contexts, odds) ^ expected
        memory.learn(step, falls[step.start : step.stop])
    return falls


def encode_full_reference(bits: Bits, dtype: str = "") -> bytes:
    """Equal to ``anchors.encode_full``."""
    field = field_of(dtype, bits.itemsize)
    blocks = [
        _encode_whole(bits[i : i + WHOLE_BLOCK], field) for i in range(0, bits.size, WHOLE_BLOCK)
    ]
    body = np.array([len(block) for block in blocks], LENGTH).tobytes() + b"".join(blocks)
    mode = anchors.CODED if len(body) < bits.nbytes else anchors.RAW
    header = anchors.HEADER.pack(anchors.MAGIC, bits.itemsize, mode, *field, bits.size)
    return header + (body if mode == anchors.CODED else bits.tobytes())


def _encode_whole(bits: Bits, field: Field) -> bytes:
    width, mask = 8 * bits.itemsize, (1 << field.width) - 1
    values = bits.tolist()
    symbols = [value >> field.low & mask for value in values]
    frequency = np.bincount(symbols, minlength=1 << field.width)
    order = np.argsort(-frequency, kind="stable")[:RANKS]
    ranked = [int(symbol) for symbol in order if frequency[symbol]]
    rank_of = {symbol: rank for rank, symbol in enumerate(ranked)}
    ranks = np.array([rank_of.get(symbol, RANKS) for symbol in symbols], np.int64)
    writer = PlaneWriter(lanes_for(bits.size))
    planes = [_put(writer, ranks >> p + 1, ranks >> p & 1) for p in range(PLANES)]
    escapes = pack([(s, field.width) for s in symbols if s not in rank_of])
    low = (1 << field.low) - 1
    above = field.low + field.width
    rest = pack([(v & low | v >> above << field.low, width - field.width) for v in values])
    head = bytes([len(ranked), *ranked]) + b"".join(odds.write() for odds in planes)
    return head + len(escapes).to_bytes(4, "little") + escapes + rest + writer.finish()


def decode_full_reference(payload: bytes, count: int, itemsize: int) -> Bits:
    """Equal to ``anchors.decode_full``."""
    _, _, mode, low, width, _ = anchors.HEADER.unpack_from(payload)
    body, dtype = payload[anchors.HEADER.size :], unsigned(itemsize)
    if mode == anchors.RAW:
        return np.frombuffer(body, dtype)
    lengths = np.frombuffer(body, LENGTH, -(-count // WHOLE_BLOCK)).tolist()
    at, values = LENGTH.itemsize * len(lengths), list[int]()
    for number, length in enumerate(lengths):
        here = min(WHOLE_BLOCK, count - number * WHOLE_BLOCK)
        values += _decode_whole(body[at : at + length], here, itemsize, Field(low, width))
        at += length
    return np.array(values, dtype)


def _decode_whole(block: bytes, count: int, itemsize: int, field: Field) -> list[int]:
    data = Bytes(block)
    symbols = list(data.take(data.number(1)))
    if len(set(symbols)) != len(symbols) or any(symbol >> field.width for symbol in symbols):
        raise CorruptError("symbols that an element cannot have, or one listed twice")
    planes = [data.odds() for _ in range(PLANES)]
    escapes = data.take(data.number(4))
    rest_width = 8 * itemsize - field.width
    rest = unpack(data.take(-(-count * rest_width // 8)), [rest_width] * count)
    reader = PlaneReader(data.rest, lanes_for(count))
    ranks = np.zeros(count, np.int64)
    for plane in reversed(range(PLANES)):
        ranks |= reader.take(ranks >> plane + 1, planes[plane]) << plane
    reader.finish()
    strange = iter(unpack(escapes, [field.width] * int(np.count_nonzero(ranks == RANKS))))
    values = []
    for rank, others in zip(ranks.tolist(), rest, strict=True):
        symbol = next(strange) if rank == RANKS else symbols[rank]
        below = others & (1 << field.low) - 1
        above = others >> field.low << field.low + field.width
        values.append(above | symbol << field.low | below)
    return values
