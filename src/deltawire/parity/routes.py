"""Packs the expert choices of a sampled sequence: the content of ``Trajectory.routes``.

All integers are little-endian. A sequence has ``positions`` tokens that were read: its prompt, and
its completion without the last token, whose routes were never computed:

====== ======== ==============================================================================
offset bytes    content
====== ======== ==============================================================================
0      1        1, the version of this layout
1      1        bits of an index: ceil(log2(experts)), 0 for a single expert
2      2        experts chosen a token and layer, K ≥ 1
4      2        layers that have experts, L ≥ 1
6      2        0
8      4        experts a layer, E ≥ K
12     4        positions, P
16     ⌈P/8⌉    which positions are recorded, position 0 in the lowest bit of the first byte
…      the rest indices of the recorded positions, position by position, layer by layer, in the
                router's order; each ``bits`` wide, filling each byte from its lowest bit
====== ======== ==============================================================================

Unused bits are 0, and no byte follows: a choice has exactly one encoding. The K experts of a token
and layer differ. A reader states L, E, K and P, which it knows from the model and the trajectory,
before it allocates memory for more than the header.

Shapes: P positions, L layers, K chosen. Arrays are int32, -1 where nothing is recorded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import CorruptError, InputError

LAYOUT: Final = 1
NOT_RECORDED: Final = -1
MAX_EXPERTS: Final = 1 << 16
MAX_CHOICES: Final = 1 << 28
"""Indices in one sequence: a million tokens through 32 layers of 8."""

_CHUNK = 1 << 18
"""Indices that are coded at a time: a multiple of 8, to fill whole bytes."""

_HEADER = struct.Struct("<BBHHHII")


@dataclass(frozen=True)
class RouteShape:
    """The dimensions that the packed form depends on: L, E and K."""

    layers: int
    experts: int
    chosen: int

    @property
    def bits(self) -> int:
        """The width of an index in bits."""
        return (self.experts - 1).bit_length()

    @classmethod
    def of(cls, data: bytes) -> RouteShape:
        """The shape that packed choices state themselves, for a reader that does not have the
        model; raises `CorruptError` for one that no choices have."""
        if len(data) < _HEADER.size:
            raise CorruptError(f"expert choices: {len(data)} bytes are shorter than the header")
        _, _, chosen, layers, _, experts, _ = _HEADER.unpack_from(data)
        if not (1 <= chosen <= experts <= MAX_EXPERTS and layers):
            raise CorruptError(f"expert choices: {layers} layers of {chosen} out of {experts}")
        return cls(layers, experts, chosen)


def pack_routes(routes_PLK: NDArray[np.int32], *, experts: int) -> bytes:
    """Packs choices; raises `InputError` if they are not among ``experts``."""
    positions, layers, chosen = routes_PLK.shape
    shape = RouteShape(layers, experts, chosen)
    if not (1 <= chosen <= experts <= MAX_EXPERTS and 1 <= layers < 1 << 16):
        raise InputError(f"{layers} layers of {chosen} out of {experts} experts cannot be packed")
    if routes_PLK.size > MAX_CHOICES:
        raise InputError(f"{routes_PLK.size} expert choices are too many for one sequence")
    recorded_P = (routes_PLK != NOT_RECORDED).any(axis=(1, 2))
    kept = routes_PLK[recorded_P]
    if kept.size and not (kept.min() >= 0 and kept.max() < experts):
        raise InputError(f"an expert choice is not one of {experts}")
    places = np.arange(shape.bits, dtype=np.int32)
    header = _HEADER.pack(LAYOUT, shape.bits, chosen, layers, 0, experts, positions)
    parts = [header, np.packbits(recorded_P, bitorder="little").tobytes()]
    for start in range(0, kept.size, _CHUNK):
        bits = (kept.reshape(-1, 1)[start : start + _CHUNK] >> places) & 1
        parts.append(np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes())
    return b"".join(parts)


def pack_parts(parts: Sequence[NDArray[np.int32]], *, positions: int, experts: int) -> bytes:
    """Packs consecutive parts of a sequence; positions after the last part count as not recorded.
    Without parts, returns nothing."""
    if not parts:
        return b""
    routes = np.full((positions, *parts[0].shape[1:]), NOT_RECORDED, np.int32)
    np.concatenate(parts, out=routes[: sum(map(len, parts))])
    return pack_routes(routes, experts=experts)


def unpack_routes(data: bytes, shape: RouteShape, *, positions: int) -> NDArray[np.int32]:
    """Unpacks choices, int32[P, L, K]; raises `CorruptError` for anything that `pack_routes` would
    not write for this shape and number of positions."""
    if len(data) < _HEADER.size:
        raise CorruptError(f"expert choices: {len(data)} bytes are shorter than the header")
    found = _HEADER.unpack_from(data)
    wanted = (LAYOUT, shape.bits, shape.chosen, shape.layers, 0, shape.experts, positions)
    if found != wanted:
        raise CorruptError(f"expert choices: the header has {found}, the model needs {wanted}")
    end = _HEADER.size + (positions + 7) // 8
    if len(data) < end or positions * shape.layers * shape.chosen > MAX_CHOICES:
        raise CorruptError(f"expert choices: {len(data)} bytes for {positions} positions")
    marks = np.unpackbits(np.frombuffer(data[_HEADER.size : end], np.uint8), bitorder="little")
    recorded_P = marks[:positions].astype(bool)
    count = int(recorded_P.sum()) * shape.layers * shape.chosen
    if len(data) != end + (count * shape.bits + 7) // 8:
        raise CorruptError(f"expert choices: {len(data)} bytes for {count} indices")
    if marks[positions:].any() or (shape.bits and data[-1] >> ((count * shape.bits - 1) % 8 + 1)):
        raise CorruptError("expert choices: unused bits are not 0")
    chosen = _indices(np.frombuffer(data, np.uint8, offset=end), count, shape.bits)
    chosen = chosen.reshape(-1, shape.layers, shape.chosen)
    if (chosen >= shape.experts).any() or (np.diff(np.sort(chosen, axis=2), axis=2) == 0).any():
        raise CorruptError("expert choices: an index is not an expert, or occurs twice")
    routes = np.full((positions, shape.layers, shape.chosen), NOT_RECORDED, np.int32)
    routes[recorded_P] = chosen
    return routes


def _indices(data: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.int32]:
    """Decodes ``count`` integers of ``bits`` bits each, int32[count]."""
    weights = 1 << np.arange(bits, dtype=np.int32)
    indices = np.zeros(count, np.int32)
    for start in range(0, count if bits else 0, _CHUNK):
        size = min(_CHUNK, count - start)
        first = start * bits // 8
        part = data[first : first + (size * bits + 7) // 8]
        places = np.unpackbits(part, count=size * bits, bitorder="little").reshape(size, bits)
        indices[start : start + size] = (places * weights).sum(axis=1, dtype=np.int32)
    return indices
