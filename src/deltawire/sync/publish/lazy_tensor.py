"""Defines `LazyTensor`, a tensor whose elements are read in parts when they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from deltawire import codec
from deltawire.codec import Bits
from deltawire.wire.run import TensorSpec


class LazyTensor(ABC):
    """A tensor that need not lie in memory; a publisher takes it in place of an array.

    ``read_into`` must give the same bits for the same elements, in any thread, while a version is
    published.

    Example::

        class Zeros(LazyTensor):
            spec = TensorSpec("w", (4, 2), "BF16")

            def read_into(self, target, start=0):
                target.fill(0)

        assert Zeros().read(2, 3).tolist() == [0, 0, 0]
    """

    spec: TensorSpec

    @abstractmethod
    def read_into(self, target: Bits, start: int = 0) -> None:
        """Fills ``target`` with unsigned bits of the elements from ``start`` on, uint[N]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.spec.shape

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.spec.count

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return self.spec.count * codec.ITEMSIZE[self.spec.dtype]

    def read(self, start: int = 0, count: int | None = None) -> Bits:
        """Reads ``count`` elements from ``start`` on (all) as unsigned bits, uint[count]."""
        found = np.empty(
            self.size - start if count is None else count, codec.unsigned_of(self.spec.dtype)
        )
        self.read_into(found, start)
        return found
