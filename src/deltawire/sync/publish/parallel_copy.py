"""Copies weights with several threads: one core seldom reaches the memory bandwidth, and a trainer
waits for the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from deltawire.codec import Bits
from deltawire.codec.delta import cores
from deltawire.sync.publish.safetensors_files import StoredTensor

PART_BYTES = 8 << 20
"""Bytes that one thread copies at a time: enough to make the hand-over cost negligible."""

_SINGLE_BYTES = 1 << 20
"""The caller's thread copies arrays with fewer bytes."""


class Copier:
    """Copies arrays, or tensors in files, into arrays of their shapes and dtypes.

    ``threads`` defaults to the number of cores; they start with the first copy that is large
    enough.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or cores()
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, pairs: Iterable[tuple[Bits, Bits | StoredTensor]]) -> None:
        """Copies the second of each pair, uint[N], into the first.

        No thread writes after this returns or raises.
        """
        running: list[Future[None]] = []
        try:
            for target, source in pairs:
                if self._threads == 1 or target.nbytes < _SINGLE_BYTES:
                    _copy_part(target, source, 0, target.size)
                    continue
                step = max(PART_BYTES // target.itemsize, 1)
                running.extend(
                    self._started().submit(_copy_part, target, source, start, start + step)
                    for start in range(0, target.size, step)
                )
        finally:
            _finish(running)
        for copied in running:
            copied.result()

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="copier")
        return self._pool

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _copy_part(target: Bits, source: Bits | StoredTensor, start: int, stop: int) -> None:
    """Copies elements ``start`` to ``stop``."""
    if isinstance(source, StoredTensor):
        source.read_into(target[start:stop], start)
    else:
        np.copyto(target[start:stop], source[start:stop])


def _finish(running: list[Future[None]]) -> None:
    """Waits for all parts; an interrupt drops those that have not started."""
    try:
        wait(running)
    except BaseException:
        for copied in running:
            copied.cancel()
        wait(running)
        raise
