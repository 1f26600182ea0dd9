"""The whole new model, each tensor through zstd level 1."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import zstandard

from benchmarks.pairs import Bf16Bits
from benchmarks.peers.base import Weights
from benchmarks.peers.container import Buffer, as_bytes, as_view, pack, unpack


class FullZstd:
    """Level 1 of each tensor's bytes."""

    name = "full-zstd1"
    used_by = "checkpoints"

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """One frame a tensor."""
        del old
        compressor = zstandard.ZstdCompressor(level=1)
        return pack(
            {name: as_bytes(compressor.compress(as_view(bits))) for name, bits in new.items()}
        )

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Decompresses, then copies."""
        decompressor = zstandard.ZstdDecompressor()
        for name, frame in unpack(payload)[0].items():
            raw = decompressor.decompress(as_view(frame))
            np.copyto(weights[name].reshape(-1), np.frombuffer(raw, np.uint16))
