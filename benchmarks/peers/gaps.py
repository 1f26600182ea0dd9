"""Flat gaps and XORed values, all of it through zstd level 1.

As in NeMo-RL (``docs/design-docs/sparse-delta-refit.md``): positions as a range where they are
contiguous, else as gaps in the smallest of uint16, uint32 and uint64; values as XOR of the integer
views; tensors packed into buckets. Its buckets hold 512 MiB; its envelope is replaced by JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.pairs import Bf16Bits
from benchmarks.peers.base import Weights
from benchmarks.peers.container import Buffer, as_bytes, as_view, pack, unpack

BUCKET_BYTES: Final = 512 << 20

_LENGTH: Final = struct.Struct("<I")
_WIDTHS: Final = (np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64))


class GapsXorZstd:
    """Gaps + XOR + zstd-1."""

    name = "gaps-xor-zstd1"
    used_by = "NeMo-RL"

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """A frame for each bucket: locations of its tensors, then their values."""
        frames: list[bytes] = []
        bucket = _Bucket()
        for name, before in old.items():
            bucket.add(name, before.reshape(-1), new[name].reshape(-1))
            if bucket.bytes >= BUCKET_BYTES:
                frames.append(bucket.close())
                bucket = _Bucket()
        frames.append(bucket.close())
        return pack({str(number): as_bytes(frame) for number, frame in enumerate(frames)})

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Sums the gaps and XORs in place at the positions."""
        decompressor = zstandard.ZstdDecompressor()
        for frame in unpack(payload)[0].values():
            _open(memoryview(decompressor.decompress(as_view(frame))), weights)


class _Bucket:
    """Tensors that share a frame."""

    def __init__(self) -> None:
        self.bytes = 0
        self._items: list[dict[str, Any]] = []
        self._locations: list[NDArray[Any]] = []
        self._values: list[NDArray[np.uint16]] = []

    def add(self, name: str, before: Bf16Bits, after: Bf16Bits) -> None:
        positions = np.flatnonzero(before != after)
        if not positions.size:
            return
        first, last = int(positions[0]), int(positions[-1])
        item: dict[str, Any] = {"name": name, "count": int(positions.size), "first": first}
        if last - first + 1 == positions.size:
            item["width"] = 0
        else:
            gaps = np.diff(positions, prepend=0)
            largest = int(gaps.max())
            width = next(dtype for dtype in _WIDTHS if largest <= np.iinfo(dtype).max)
            item["width"] = width.itemsize
            self._locations.append(gaps.astype(width))
            self.bytes += self._locations[-1].nbytes
        self._items.append(item)
        self._values.append(np.bitwise_xor(before[positions], after[positions]))
        self.bytes += self._values[-1].nbytes

    def close(self) -> bytes:
        header = json.dumps(self._items).encode()
        parts = [array.tobytes() for array in (*self._locations, *self._values)]
        content = b"".join([_LENGTH.pack(len(header)), header, *parts])
        return zstandard.ZstdCompressor(level=1).compress(content)


def _open(content: memoryview, weights: Weights) -> None:
    (length,) = _LENGTH.unpack_from(content)
    at = _LENGTH.size + length
    items = json.loads(bytes(content[_LENGTH.size : at]))
    locations: list[Any] = []
    for item in items:
        if item["width"] == 0:
            locations.append(slice(item["first"], item["first"] + item["count"]))
            continue
        gaps = np.frombuffer(content, f"<u{item['width']}", item["count"], at)
        locations.append(np.cumsum(gaps, dtype=np.int64))
        at += gaps.nbytes
    for item, where in zip(items, locations, strict=True):
        values = np.frombuffer(content, np.uint16, item["count"], at)
        at += values.nbytes
        weights[item["name"]].reshape(-1)[where] ^= values
