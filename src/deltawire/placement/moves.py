"""Stages changes of live bits, and exchanges all of them or none, on the host or on a device.

All storages of one device and one element width are handled together. On the host, one native pass
checks the old bits, writes the new ones and reads them back, a few cache lines at a time. Many
changes are exchanged on every core that the process may use, since nothing is served meanwhile. On
a device there are three passes over all storages, because a launch per storage would cost more than
the bytes do. Triton kernels make them where Triton runs, torch operations elsewhere.
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
from deltawire.placement.kernels import Kernels
from deltawire.placement.on_device import kernels_of, on_host

DRIFTED = "live bits differ from the mirror's; attest, and load again"
LOST = "new bits did not reach the weights"
OUTSIDE = "changes lie outside the live tensors"

CHANGES_PER_THREAD = 1 << 18
"""Half a millisecond of work. Fewer changes are not worth a thread: if other processes keep the
cores busy, it starts a time slice later, which is milliseconds."""

Part = tuple[NDArray[np.int64], Bits, Bits]
"""Flat positions in a storage, the old bits there, and the new ones."""


@dataclass(frozen=True, slots=True)
class StorageRange:
    """The storage ``name``, as flat integers ``live``, and the changes of a move that lie in it:
    ``first`` to ``last``."""

    name: str
    live: Tensor
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Move:
    """Changes in storages of one device and one element width.

    ``index``, int[N], counts from the start of each range's storage; ``old`` and ``new`` are the
    bits there, integers of the storages' width. All lie on the storages' device; ``table`` tells
    its kernels which range lies where. On the host, ``arrays`` are the storages of the ranges,
    viewed while preparing, so that no step waits for it.
    """

    ranges: list[StorageRange]
    index: Tensor
    old: Tensor
    new: Tensor
    kernels: Kernels | None = None
    table: Tensor | None = None
    arrays: Sequence[Bits] = ()

    @property
    def changes(self) -> int:
        """The number of live elements that change."""
        return self.index.numel()

    @property
    def bytes(self) -> int:
        """The bytes allocated for it."""
        table = 0 if self.table is None else self.table.nbytes
        return self.index.nbytes + self.old.nbytes + self.new.nbytes + table

    def reversed(self) -> Move:
        """Returns the move back, over the same memory."""
        return replace(self, old=self.new, new=self.old)

    def exchange(self) -> None:
        """Replaces the old bits by the new ones.

        Raises `ResyncError`, leaving everything as it was, if live bits are not the old ones
        before, or not the new ones afterwards. After any other interruption, call `restore_old`.
        """
        if self.kernels is not None:
            fault = self._exchange_by_kernels()
        elif on_host(self.index):
            fault = self._exchange_on_host()
        else:
            fault = self._exchange_by_torch()
        if fault:
            raise ResyncError(fault)

    def restore_old(self) -> None:
        """Writes the old bits unconditionally."""
        if self.kernels is not None:
            assert self.table is not None
            self.kernels.write(self.table, self.index, self.old)
            return
        for extent, index, old, _ in self._parts():
            extent.live.index_copy_(0, index.long(), old)

    def _parts(self) -> list[tuple[StorageRange, Tensor, Tensor, Tensor]]:
        return [
            (
                extent,
                self.index[extent.first : extent.last],
                self.old[extent.first : extent.last],
                self.new[extent.first : extent.last],
            )
            for extent in self.ranges
        ]

    def _exchange_on_host(self) -> str:
        code, where = _native.exchange(
            list(self.arrays),
            np.array([extent.last for extent in self.ranges], np.int64),
            self.index.numpy(),
            array_of(self.old),
            array_of(self.new),
            max(1, min(cores(), self.changes // CHANGES_PER_THREAD)),
        )
        fault = ("", DRIFTED, LOST)[code]
        return fault and f"{self.ranges[where].name}: {fault}"

    def _exchange_by_kernels(self) -> str:
        assert self.kernels is not None
        assert self.table is not None
        found = self.kernels.exchange(self.table, self.index, self.old, self.new)
        if found.lost and not (found.drifted or found.outside):
            self.restore_old()
        return (
            OUTSIDE if found.outside else DRIFTED if found.drifted else LOST if found.lost else ""
        )

    def _exchange_by_torch(self) -> str:
        parts = self._parts()
        if _differ([(s.live.index_select(0, index), old) for s, index, old, _ in parts]):
            return DRIFTED
        for extent, index, _, new in parts:
            extent.live.index_copy_(0, index.long(), new)
        if _differ([(s.live.index_select(0, index), new) for s, index, _, new in parts]):
            self.restore_old()
            return LOST
        return ""


def _differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Returns whether any pair differs, with a single synchronization of the device."""
    return bool(torch.stack([(found != expected).any() for found, expected in pairs]).any())


def stage(
    parts: Sequence[list[Part]],
    names: Sequence[str],
    flats: Sequence[Tensor],
    *,
    kernels: Kernels | None = None,
) -> list[Move]:
    """Copies changes to the storages' devices, and returns a move for each device and width.

    ``parts`` lists the changes of each storage, ``flats`` the storages as flat integers. Copies run
    concurrently with the device's own work. Empties the lists of parts. ``kernels`` replace the
    devices' own.
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
        ranges, first = [], 0
        for number in numbers:
            last = first + sum(part[0].size for part in parts[number])
            ranges.append(StorageRange(names[number], flats[number], first, last))
            first = last
        staged = [part for number in numbers for part in parts[number]]
        for number in numbers:
            parts[number].clear()
        with _staging(device):
            index = torch.from_numpy(np.concatenate([p[0] for p in staged], dtype=dtype)).to(device)
            old = tensor_of(np.concatenate([p[1] for p in staged])).to(device)
            new = tensor_of(np.concatenate([p[2] for p in staged])).to(device)
            table = None
            if own is not None:
                spans = [(s.live, s.first, s.last) for s in ranges]
                table = own.table(spans).to(device)
        arrays = [array_of(extent.live) for extent in ranges if on_host(extent.live)]
        moves.append(Move(ranges, index, old, new, own, table, arrays))
    return moves


def _staging(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which copies to a device run concurrently with its computation."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(_staging_stream(device))


@cache
def _staging_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the one staging stream of a device, since each stream keeps its own memory. Memory
    staged on it may be reused once freed, so an exchange waits for its kernels."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
