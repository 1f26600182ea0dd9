"""XOR of all bytes, then zstd level 1, a frame for each tensor that changed.

As in slime and miles (``slime/utils/disk_delta.py``) and SkyRL
(``skyrl/backends/skyrl_train/weight_sync/``): safetensors of one uint8 tensor per changed tensor.
Their checksums of the whole new tensor are left out, so that only the coding is timed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import zstandard

from benchmarks.pairs import Bf16Bits
from benchmarks.peers.base import Weights
from benchmarks.peers.container import Buffer, as_bytes, as_view, pack, unpack


class XorZstd:
    """XOR + zstd-1."""

    name = "xor-zstd1"
    used_by = "slime, SkyRL"

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """A frame for each tensor with any change."""
        compressor = zstandard.ZstdCompressor(level=1)
        entries = {}
        for name, before in old.items():
            difference = np.bitwise_xor(before.reshape(-1), new[name].reshape(-1))
            if difference.any():
                entries[name] = as_bytes(compressor.compress(as_view(difference)))
        return pack(entries)

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Decompresses a whole tensor, then XORs it in."""
        decompressor = zstandard.ZstdDecompressor()
        for name, frame in unpack(payload)[0].items():
            raw = decompressor.decompress(as_view(frame))
            flat = weights[name].reshape(-1)
            np.bitwise_xor(flat, np.frombuffer(raw, np.uint16), out=flat)
