"""Sparse safetensors: flat int32 positions and bf16 values, no compression.

As in TRL's first delta weight sync (branch ``delta-weight-sync``, pull request 5417):
``NAME.indices`` int32, ``NAME.values`` bf16, for the tensors that changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.pairs import Bf16Bits
from benchmarks.peers.base import Weights
from benchmarks.peers.container import Buffer, Entry, pack, unpack

_INDICES, _VALUES = ".indices", ".values"


class SparseSafetensors:
    """int32 + bf16: 48 bits a changed weight."""

    name = "sparse-int32"
    used_by = "TRL"

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """Positions and new values of each tensor that changed."""
        entries = {}
        for name, before in old.items():
            after = new[name].reshape(-1)
            positions = np.flatnonzero(before.reshape(-1) != after)
            if positions.size:
                entries[name + _INDICES] = Entry("I32", positions.astype(np.int32))
                entries[name + _VALUES] = Entry("BF16", after[positions])
        return pack(entries, {"format": "sparse_weight_patch", "version": "1"})

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Scatters."""
        arrays, _ = unpack(payload)
        for key, positions in arrays.items():
            if key.endswith(_INDICES):
                name = key.removesuffix(_INDICES)
                weights[name].reshape(-1)[positions] = arrays[name + _VALUES]
