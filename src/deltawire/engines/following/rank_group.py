"""Exchanges small values among the ranks of one engine, over its own CPU process group."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed

T = TypeVar("T")


class RankGroup:
    """The ranks of one engine, of which this is ``number`` of ``count``.

    ``group`` is a CPU process group; a single rank needs none. All ranks must call each method
    together.
    """

    def __init__(self, group: Any, number: int, count: int) -> None:
        self.number = number
        self.count = count
        self._group = group

    def gather(self, words: list[int]) -> list[list[int]]:
        """Returns the 64-bit words of every rank, in rank order; all ranks give equally many."""
        if self.count == 1:
            return [words]
        own = torch.tensor(words, dtype=torch.int64)
        every = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(every, own, group=self._group)
        return [answer.tolist() for answer in every]

    def gather_structs(self, struct: T) -> list[T]:
        """Returns one msgspec struct from every rank."""
        if self.count == 1:
            return [struct]
        import msgspec

        coded = msgspec.msgpack.encode(struct)
        sizes = self.gather([len(coded)])
        longest = max(size for (size,) in sizes)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(coded)] = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(every, own, group=self._group)
        return [
            msgspec.msgpack.decode(part.numpy()[:size].tobytes(), type=type(struct))
            for part, (size,) in zip(every, sizes, strict=True)
        ]
