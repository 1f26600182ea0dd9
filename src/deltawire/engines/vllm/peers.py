"""Agreement among the ranks of one engine: small gatherings over vLLM's own group for hosts."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed

T = TypeVar("T")


class Peers:
    """The ranks of one engine, of which this is ``number``. ``group`` is a process group on CPUs;
    none is needed by one rank alone. Every gathering is to be entered by all of them."""

    def __init__(self, group: Any, number: int, count: int) -> None:
        self.number = number
        self.count = count
        self._group = group

    def gather(self, words: list[int]) -> list[list[int]]:
        """The words of every rank, in their order; of each as many, of 64 bits."""
        if self.count == 1:
            return [words]
        own = torch.tensor(words, dtype=torch.int64)
        every = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(every, own, group=self._group)
        return [answer.tolist() for answer in every]

    def gather_structs(self, struct: T) -> list[T]:
        """One msgspec struct of every rank."""
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
