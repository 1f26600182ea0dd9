"""Computes the order in which rows are drawn as a function of a position, a number. A position is
thus enough to resume a stream, and processes with equal positions draw equal rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError

BLOCK = 1000
"""The number of positions over which a mixture's shares are exact, to the nearest whole number."""


def _seeded(*parts: object) -> np.random.Generator:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def stream_seed(seed: int, stream: str) -> int:
    """Returns a separate seed for a stream, 0 … 2³² − 1."""
    digest = hashlib.blake2b(f"{seed} {stream}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@lru_cache(maxsize=64)
def permuted(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of an epoch: a permutation of 0 … count − 1, int64[count]; do not change
    it.
    """
    return _seeded("epoch", seed, epoch).permutation(count)


def take(position: int, count: int, *, seed: int, shuffle: bool = True) -> tuple[int, int]:
    """Returns the epoch and the row of a position, over ``count`` rows without replacement.

    Positions 0 … count − 1 take every row once; the next ``count`` take every row once more, in
    another order, or in the same order without ``shuffle``.
    """
    epoch, place = divmod(position, count)
    return epoch, int(permuted(count, seed, epoch)[place]) if shuffle else place


def heldout_rows(count: int, share: float) -> NDArray[np.int64]:
    """Returns the rows of ``count`` that are held out, int64[H], in a fixed random order: at least
    one and not all.

    Raises `InputError` for fewer than two rows.
    """
    if count < 2:
        raise InputError(
            f"{count} row cannot be divided into held-out and training rows",
            hint="set heldout_share = 0, or give more rows",
        )
    held = min(max(1, round(share * count)), count - 1)
    return _seeded("heldout", count).permutation(count)[:held]


@lru_cache(maxsize=16)
def _block(weights: tuple[float, ...], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the part of each of `BLOCK` positions, and how many of that part come before it."""
    shares = np.array(weights) / sum(weights) * BLOCK
    counts = np.floor(shares).astype(np.int64)
    short = np.argsort(counts - shares, kind="stable")[: BLOCK - int(counts.sum())]
    counts[short] += 1
    parts = _seeded("mixture", seed).permutation(np.repeat(np.arange(len(weights)), counts))
    before = np.zeros(BLOCK, np.int64)
    for part in range(len(weights)):
        mine = parts == part
        before[mine] = np.arange(int(mine.sum()))
    return parts, before


def mixture_of(position: int, weights: Sequence[float], *, seed: int) -> tuple[int, int]:
    """Returns the part of a mixture that a position draws from, and the position in that part.

    Each part has its share of every `BLOCK` positions, in an order that ``seed`` decides; positions
    within a part have no gaps. Raises `InputError` if a weight is too small for that.
    """
    parts, before = _block(tuple(weights), seed)
    counts = np.bincount(parts, minlength=len(weights))
    if not counts.all():
        least = min(weights) / sum(weights)
        raise InputError(
            f"a weight of {least:.2g} of the mixture is less than one position in {BLOCK}",
            hint="raise it, or leave the part out",
        )
    block, place = divmod(position, BLOCK)
    part = int(parts[place])
    return part, block * int(counts[part]) + int(before[place])
