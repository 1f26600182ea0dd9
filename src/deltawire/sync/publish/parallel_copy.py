"""Weights copied by several threads: one core seldom reaches the bandwidth of memory, and a trainer
waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from deltawire.codec import Bits
from deltawire.codec.delta import cores

PART_BYTES = 8 << 20
"""Copied at a time by one thread: long against what handing it over costs."""

_ALONE_BYTES = 1 << 20
"""Smaller arrays are not worth handing over."""


class Copier:
    """Copies arrays into others of their shapes and dtypes; ``threads`` at once, by default as
    many as there are cores. Threads are started with the first copy that is worth them."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or cores()
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, pairs: Iterable[tuple[Bits, Bits]]) -> None:
        """Copy the second of each pair, uint[N], into the first. When this returns or raises,
        nothing is written any more."""
        under_way: list[Future[None]] = []
        try:
            for target, source in pairs:
                if self._threads == 1 or target.nbytes < _ALONE_BYTES:
                    np.copyto(target, source)
                    continue
                under_way.extend(
                    self._started().submit(np.copyto, *part) for part in _parts(target, source)
                )
        finally:
            _finish(under_way)
        for copied in under_way:
            copied.result()

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="copier")
        return self._pool

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _parts(target: Bits, source: Bits) -> Iterable[tuple[Bits, Bits]]:
    step = PART_BYTES // target.itemsize
    for start in range(0, target.size, step):
        yield target[start : start + step], source[start : start + step]


def _finish(under_way: list[Future[None]]) -> None:
    """Wait for all. If somebody interrupts that, what has not begun is dropped."""
    try:
        wait(under_way)
    except BaseException:
        for copied in under_way:
            copied.cancel()
        wait(under_way)
        raise
