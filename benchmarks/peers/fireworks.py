"""Fireworks' own codecs, from the MIT-licensed wheel ``fireworks-delta-compression``.

arc_v2 is XOR + zstd, arc_v3 a choice of typed codings with a pickle as its envelope, so this
decodes only bytes that the same process has just encoded. Both compute Adler-32 of the new tensor
on each side, which cannot be disabled. arc_v3 runs its candidates on separate threads and takes the
smallest that finishes in time, so its size may vary between runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.pairs import Bf16Bits
from benchmarks.peers.base import Weights
from benchmarks.peers.container import Buffer, Entry, pack, unpack


class Fireworks:
    """One of the wheel's formats, ``arc_v2`` or ``arc_v3``, tensor by tensor."""

    used_by = "Fireworks"

    def __init__(self, version: str) -> None:
        import fireworks_delta_compression
        import torch

        self.name = version.replace("_", "-")
        self._version = version
        self._library: Any = fireworks_delta_compression
        self._torch = torch

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """Every tensor, the unchanged too, and its checksum in the metadata: as the wheel's own
        ``delta_compress_dicts_to_file``."""
        entries, checksums = {}, {}
        for name, before in old.items():
            compressed, checksums[name] = self._library.delta_compress(
                src=self._tensor(before),
                dst=self._tensor(new[name]),
                compression_format=self._version,
            )
            entries[name] = Entry("U8", compressed.numpy())
        return pack(entries, checksums)

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """The wheel returns new tensors, which replace the old ones."""
        arrays, checksums = unpack(payload)
        for name, compressed in arrays.items():
            with warnings.catch_warnings():
                # The wheel wraps read-only bytes in a tensor, which it does not write to.
                warnings.simplefilter("ignore", UserWarning)
                restored = self._library.delta_decompress(
                    src=self._tensor(weights[name]),
                    compressed_diff=self._torch.from_numpy(compressed.copy()),
                    checksum=checksums[name],
                    compression_format=self._version,
                )
            bits = restored.view(self._torch.int16).numpy().view(np.uint16)
            weights[name] = bits.reshape(weights[name].shape)

    def _tensor(self, bits: Bf16Bits) -> Any:
        return self._torch.from_numpy(bits.view(np.int16)).view(self._torch.bfloat16)
