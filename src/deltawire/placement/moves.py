"""Changes of live bits, staged beside them and exchanged all or none: on the host, on a device.

All storages of a device and a width are gone through together. On the host one native pass checks
the old bits, writes the new ones and reads them back, a few cache lines at a time, on every core
that the process may use: nothing is served meanwhile. On a device there are three passes; a launch
for each storage would cost more than the bytes do. Triton's kernels make them where there are some,
torch's operations elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltawire import _native
from deltawire.codec import Bits
from deltawire.codec.delta import cores
from deltawire.errors import ResyncError
from deltawire.placement.elements import array_of, tensor_of
from deltawire.placement.on_device import Kernels, kernels_of, on_host

DRIFTED = "live bits are not the mirror's; attest, and load again"
LOST = "new bits did not reach the weights"
OUTSIDE = "changes lie outside of the live tensors"

Part = tuple[NDArray[np.int64], Bits, Bits]
"""Flat positions in a storage, the bits there, and those to come."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Changes ``first`` to ``last`` of a move lie in the storage ``name``: flat integers
    ``live``."""

    name: str
    live: Tensor
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Move:
    """Changes in storages of one device and one width.

    ``index``, int[N], counts from the start of each stretch's storage; ``old`` and ``new`` are the
    bits there, integers of the storages' width. All lie on the storages' device; ``table`` says to
    its kernels which stretch lies where.
    """

    stretches: list[Stretch]
    index: Tensor
    old: Tensor
    new: Tensor
    kernels: Kernels | None = None
    table: Tensor | None = None

    @property
    def changes(self) -> int:
        """How many live elements change."""
        return self.index.numel()

    @property
    def bytes(self) -> int:
        """What is allocated for it."""
        table = 0 if self.table is None else self.table.nbytes
        return self.index.nbytes + self.old.nbytes + self.new.nbytes + table

    def reversed(self) -> Move:
        """The way back, over the same memory."""
        return replace(self, old=self.new, new=self.old)

    def exchange(self) -> None:
        """Put the new bits in the place of the old ones.

        Raises `ResyncError`, having left everything as it was, if live bits are not the old ones
        before, or not the new ones afterwards. What else interrupts it calls for `put_back`.
        """
        if self.kernels is not None:
            fault = self._exchange_by_kernels()
        elif on_host(self.index):
            fault = self._exchange_on_host()
        else:
            fault = self._exchange_by_torch()
        if fault:
            raise ResyncError(fault)

    def put_back(self) -> None:
        """Write the old bits, whatever is there."""
        if self.kernels is not None:
            assert self.table is not None
            self.kernels.write(self.table, self.index, self.old)
            return
        for stretch, index, old, _ in self._parts():
            stretch.live.index_copy_(0, index.long(), old)

    def _parts(self) -> list[tuple[Stretch, Tensor, Tensor, Tensor]]:
        return [
            (
                stretch,
                self.index[stretch.first : stretch.last],
                self.old[stretch.first : stretch.last],
                self.new[stretch.first : stretch.last],
            )
            for stretch in self.stretches
        ]

    def _exchange_on_host(self) -> str:
        code, where = _native.exchange(
            [array_of(stretch.live) for stretch in self.stretches],
            np.array([stretch.last for stretch in self.stretches], np.int64),
            self.index.numpy(),
            array_of(self.old),
            array_of(self.new),
            cores(),
        )
        fault = ("", DRIFTED, LOST)[code]
        return fault and f"{self.stretches[where].name}: {fault}"

    def _exchange_by_kernels(self) -> str:
        assert self.kernels is not None
        assert self.table is not None
        found = self.kernels.exchange(self.table, self.index, self.old, self.new)
        if found.lost and not (found.drifted or found.outside):
            self.put_back()
        return (
            OUTSIDE if found.outside else DRIFTED if found.drifted else LOST if found.lost else ""
        )

    def _exchange_by_torch(self) -> str:
        parts = self._parts()
        if _differ([(s.live.index_select(0, index), old) for s, index, old, _ in parts]):
            return DRIFTED
        for stretch, index, _, new in parts:
            stretch.live.index_copy_(0, index.long(), new)
        if _differ([(s.live.index_select(0, index), new) for s, index, _, new in parts]):
            self.put_back()
            return LOST
        return ""


def _differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether any two differ; a device is asked once."""
    return bool(torch.stack([(found != expected).any() for found, expected in pairs]).any())


def stage(
    parts: Sequence[list[Part]],
    names: Sequence[str],
    flats: Sequence[Tensor],
    *,
    kernels: Kernels | None = None,
) -> list[Move]:
    """Moves of all ``parts``, which are those of each storage, whose flat integers are ``flats``.

    They are moved to the storages' devices, beside what runs there. Empties the lists of parts.
    ``kernels`` are those to use on every device, if not the device's own.
    """
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for number, flat in enumerate(flats):
        if parts[number]:
            groups.setdefault((flat.device, flat.element_size()), []).append(number)
    moves = []
    for (device, _), numbers in groups.items():
        own = kernels or kernels_of(device)
        small = own is not None and all(flats[n].numel() < 1 << 31 for n in numbers)
        dtype = np.int32 if small else np.int64
        stretches, first = [], 0
        for number in numbers:
            last = first + sum(part[0].size for part in parts[number])
            stretches.append(Stretch(names[number], flats[number], first, last))
            first = last
        staged = [part for number in numbers for part in parts[number]]
        for number in numbers:
            parts[number].clear()
        with _beside(device):
            index = torch.from_numpy(np.concatenate([p[0] for p in staged], dtype=dtype)).to(device)
            old = tensor_of(np.concatenate([p[1] for p in staged])).to(device)
            new = tensor_of(np.concatenate([p[2] for p in staged])).to(device)
            table = None
            if own is not None:
                spans = [(s.live, s.first, s.last) for s in stretches]
                table = own.table(spans).to(device)
        moves.append(Move(stretches, index, old, new, own, table))
    return moves


def _beside(device: torch.device) -> AbstractContextManager[object]:
    """Copies to a device in here don't wait for what it computes, nor hold that up."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(_staging_stream(device))


@cache
def _staging_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: each stream keeps memory of its own. What was staged on it may be overwritten
    once it is freed, which is why an exchange waits for its kernels."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
