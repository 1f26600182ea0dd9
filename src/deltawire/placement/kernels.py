"""Defines the interface of kernels that work on many storages of a device at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from deltawire.placement.affine import AffineMap


class Found(NamedTuple):
    """The faults of an exchange: whether changes were ``outside`` their storage, live bits had
    ``drifted`` from the old ones (nothing was written then), or new bits were ``lost``.
    """

    outside: bool
    drifted: bool
    lost: bool


class Kernels(Protocol):
    """Operations on a device that cover many storages in one launch."""

    LARGEST: int
    """The most elements of one part of a digest."""

    def table(self, spans: Sequence[tuple[Tensor, int, int]]) -> Tensor:
        """Builds the table of where changes ``first`` to ``last`` of each storage lie."""

    def exchange(self, table: Tensor, index: Tensor, old: Tensor, new: Tensor) -> Found:
        """Checks the old bits, writes the new ones unless any differed, and reads them back."""

    def write(self, table: Tensor, index: Tensor, bits: Tensor) -> None:
        """Writes bits unconditionally."""

    def digest(
        self, flat: Tensor, part: AffineMap, key: int, *, widened: bool, lanes: Tensor, odd: Tensor
    ) -> bool:
        """Adds the digest of a part to ``lanes``, int64[2, K], whose rows are summed, and sets
        ``odd``, int32[1], if widened bits have a lower half. Returns False if there is no kernel
        for such a part."""


def signed(word: int) -> int:
    """Returns a 64-bit word as a signed integer."""
    return word - (1 << 64) if word >> 63 else word
