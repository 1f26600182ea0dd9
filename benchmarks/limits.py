"""Measures the speeds of memory that no codec can exceed, in the same process as the codec."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.pairs import Bf16Bits


def timed(
    work: Callable[[], Any],
    *,
    repeats: int,
    seconds: float,
    prepare: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Returns the seconds of each call of ``work``: ``repeats`` calls, or fewer once ``seconds``
    have passed, but at least one. ``prepare`` runs before each and is not counted."""
    taken: list[float] = []
    while not taken or (len(taken) < repeats and sum(taken) < seconds):
        prepare()
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


class Limits:
    """Reading two models and copying one, measured whenever asked: before, between and after the
    work that is compared with them."""

    def __init__(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> None:
        self._old, self._new = old, new
        self._reads: list[float] = []
        self._copies: list[float] = []

    def measure(self, repeats: int, seconds: float) -> None:
        """Measures again; `repeats` and `seconds` as in `timed`, for reading and for copying."""
        self._reads += timed(
            lambda: read_both(self._old, self._new), repeats=repeats, seconds=seconds
        )
        spare = {name: np.zeros_like(bits) for name, bits in self._new.items()}
        copy_one(self._new, spare)  # fresh pages cost more than copying
        self._copies += timed(lambda: copy_one(self._new, spare), repeats=repeats, seconds=seconds)

    def medians(self) -> tuple[float, float]:
        """Seconds to read both, and to copy one, over all measurements."""
        return median(self._reads), median(self._copies)


def read_both(old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> None:
    """Reads every bit of both models once and ORs them together, which is almost no work.

    Of NumPy's ways to read two arrays (XOR or comparison in pieces, maximum, comparison of bytes)
    this is the fastest, and so the strictest limit.
    """
    for name, before in old.items():
        for bits in (before.reshape(-1), new[name].reshape(-1)):
            whole = bits.size - bits.size % 4
            np.bitwise_or.reduce(bits[:whole].view(np.uint64))


def copy_one(new: Mapping[str, Bf16Bits], into: Mapping[str, NDArray[Any]]) -> None:
    """Copies a model into memory that is already allocated."""
    for name, bits in new.items():
        np.copyto(into[name], bits)
