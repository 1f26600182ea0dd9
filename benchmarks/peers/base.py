"""The interface of a measured format: encode to parts of a file, decode into weights in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from benchmarks.pairs import Bf16Bits
from benchmarks.peers.container import Buffer

Weights = dict[str, Bf16Bits]
"""uint16 bits by tensor name, shaped and contiguous."""


class Format(Protocol):
    """One way to write what changed between two versions of a model."""

    @property
    def name(self) -> str:
        """Its name in the table."""
        ...

    @property
    def used_by(self) -> str:
        """The systems that ship deltas in this format."""
        ...

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """The file, in parts that are not joined."""
        ...

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Turns ``weights`` from old to new: in place, or by replacing arrays."""
        ...
