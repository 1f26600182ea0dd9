"""Copies weights with several threads: one core seldom reaches the memory bandwidth, and a trainer
waits for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait

import numpy as np

from deltawire.codec import Bits
from deltawire.codec.delta import cores
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.publish.lazy_tensor import LazyTensor

PART_BYTES = 8 << 20
"""Bytes that one thread copies at a time: enough to make the hand-over cost negligible."""

_SINGLE_BYTES = 1 << 20
"""The caller's thread copies arrays with fewer bytes."""


class Copier:
    """Copies arrays, or tensors that are read in parts, into arrays of their shapes and dtypes.

    ``threads`` defaults to the number of cores; they start with the first copy that is large
    enough.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or cores()
        self._pool: WorkerThreads | None = None

    def copy(
        self,
        pairs: Iterable[tuple[Bits, Bits | LazyTensor]],
        *,
        touched: Callable[[int], None] | None = None,
    ) -> None:
        """Copies the second of each pair, uint[N], into the first.

        ``touched`` is called with the number of bytes of each part that was written, in any thread.
        No thread writes after this returns or raises.
        """

        def copy_part(target: Bits, source: Bits | LazyTensor, start: int, stop: int) -> None:
            """Copies elements ``start`` to ``stop``."""
            part = target[start:stop]
            if isinstance(source, LazyTensor):
                source.read_into(part, start)
            else:
                np.copyto(part, source[start:stop])
            if touched is not None:
                touched(part.nbytes)

        running: list[Future[None]] = []
        try:
            for target, source in pairs:
                step = max(PART_BYTES // target.itemsize, 1)
                if self._threads == 1 or target.nbytes < _SINGLE_BYTES:
                    for start in range(0, target.size, step):
                        copy_part(target, source, start, start + step)
                    continue
                running.extend(
                    self._started().submit(copy_part, target, source, start, start + step)
                    for start in range(0, target.size, step)
                )
        finally:
            _finish(running)
        for copied in running:
            copied.result()

    def _started(self) -> WorkerThreads:
        if self._pool is None:
            self._pool = WorkerThreads(self._threads, thread_name_prefix="copier")
        return self._pool

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _finish(running: list[Future[None]]) -> None:
    """Waits for all parts; an interrupt drops those that have not started."""
    try:
        wait(running)
    except BaseException:
        for copied in running:
            copied.cancel()
        wait(running)
        raise
