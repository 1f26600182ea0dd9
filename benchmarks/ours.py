"""deltawire's own codings in the shape of `benchmarks.peers.Format`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.pairs import DTYPE, Bf16Bits
from benchmarks.peers.base import Weights
from benchmarks.peers.container import Buffer, as_bytes, as_view, pack, unpack
from deltawire import codec


class Delta:
    """A delta a tensor; decoding is decode and apply, in place."""

    name = "deltawire"
    used_by = "this project"

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """A payload for each tensor, changed or not."""
        entries = {}
        for name, before in old.items():
            payload = codec.encode(before, new[name], dtype=DTYPE, threads=self._threads)
            entries[name] = as_bytes(payload)
        return pack(entries)

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Decodes and applies block by block."""
        for name, coded in unpack(payload)[0].items():
            base = weights[name]
            codec.advance(as_view(coded), base, dtype=DTYPE, threads=self._threads)


class Anchor:
    """Whole models through the entropy coder."""

    name = "anchor"
    used_by = "this project"

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """Encodes every tensor whole."""
        del old
        return pack(
            {
                name: as_bytes(codec.encode_full(bits.reshape(-1), DTYPE, threads=self._threads))
                for name, bits in new.items()
            }
        )

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """New arrays replace the old ones."""
        for name, coded in unpack(payload)[0].items():
            shape, count = weights[name].shape, weights[name].size
            bits = codec.decode_full(as_view(coded), count, 2, threads=self._threads)
            weights[name] = bits.astype(np.uint16, copy=False).reshape(shape)


def digest_all(weights: Mapping[str, Bf16Bits]) -> None:
    """The digest pass over every tensor."""
    for name, bits in weights.items():
        codec.digest_bits(name, bits.reshape(-1))
