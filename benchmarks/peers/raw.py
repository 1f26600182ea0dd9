"""The raw bytes of the new model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.pairs import Bf16Bits
from benchmarks.peers.base import Weights
from benchmarks.peers.container import Buffer, Entry, pack, unpack


class Raw:
    """The new bits as they are: what it costs to send everything."""

    name = "raw"
    used_by = "checkpoints"

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """Copies, as writing a file does."""
        del old
        return pack({name: Entry("BF16", bits.reshape(-1).copy()) for name, bits in new.items()})

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Copies over what was there."""
        for name, bits in unpack(payload)[0].items():
            np.copyto(weights[name].reshape(-1), bits)
