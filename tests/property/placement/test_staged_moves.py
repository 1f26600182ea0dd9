"""Staged changes of several storages, exchanged on any number of cores, equal NumPy's assignment:
all of them, or none."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import ResyncError
from deltawire.placement import moves
from deltawire.placement.elements import CARRIER, tensor_of

CHANGES_PER_THREAD = 1 << 10
"""Instead of the real number, so that small draws use several threads."""


class Storage(NamedTuple):
    """Elements, their width in bytes, and how many of them change in each part."""

    width: int
    size: int
    changed: tuple[int, ...]


@st.composite
def storages(draw):
    """Some without changes, some with parts of none, some of which every element changes. The
    native code gives a thread at least 32,768 changes, so some have more."""
    size = draw(st.sampled_from([1, 3, 700, 40_000, 150_000]))
    parts = draw(st.lists(st.sampled_from([0.0, 0.001, 0.3, 0.5]), max_size=2))
    counts = tuple(int(share * size) for share in parts)
    return Storage(draw(st.sampled_from(sorted(CARRIER))), size, counts)


def drawn(held, rng):
    """The storages as flat integers, and their parts."""
    flats, parts = [], []
    for one in held:
        unsigned = np.dtype(f"u{one.width}")
        high = np.iinfo(unsigned).max
        bits = rng.integers(0, high, one.size, unsigned, endpoint=True)
        order, mine, first = rng.permutation(one.size), [], 0
        for count in one.changed:
            at = order[first : first + count].astype(np.int64)
            new = rng.integers(0, high, at.size, unsigned, endpoint=True)
            mine.append((at, bits[at], new))
            first += count
        flats.append(tensor_of(bits))
        parts.append(mine)
    return flats, parts


def on_cores(move, cores):
    """Exchanges as on a machine of so many cores; the number of threads that it asked for."""
    native, given_threads = moves._native, []

    def exchange(*arguments):
        given_threads.append(arguments[-1])
        return native.exchange(*arguments)

    with (
        mock.patch.object(moves, "CHANGES_PER_THREAD", CHANGES_PER_THREAD),
        mock.patch.object(moves, "cores", return_value=cores),
        mock.patch.object(moves, "_native", mock.Mock(exchange=exchange)),
    ):
        try:
            move.exchange()
        finally:
            (threads,) = given_threads
            assert 1 <= threads <= cores
            assert threads == 1 or threads * CHANGES_PER_THREAD <= move.changes


def same(flats, expected):
    return all(torch.equal(*pair) for pair in zip(flats, expected, strict=True))


@given(st.lists(storages(), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_an_exchange_on_any_number_of_cores_is_all_or_nothing(held, cores, seed):
    rng = np.random.default_rng(seed)
    flats, parts = drawn(held, rng)
    before = [flat.clone() for flat in flats]
    expected = [flat.clone() for flat in flats]
    for flat, mine in zip(expected, parts, strict=True):
        for at, _, new in mine:
            flat[torch.from_numpy(at)] = tensor_of(new)
    names = [f"storage {number}" for number in range(len(flats))]
    staged = moves.stage(parts, names, flats)
    assert parts == [[] for _ in flats]
    assert sum(move.changes for move in staged) == sum(sum(one.changed) for one in held)

    for move in staged:
        if not move.changes:
            continue
        # One element drifted: nothing changes, and its storage is named.
        place = int(rng.integers(move.changes))
        extent = next(one for one in move.ranges if one.first <= place < one.last)
        at = int(move.index[place])
        extent.live[at] ^= 1
        drifted = [flat.clone() for flat in flats]
        with pytest.raises(ResyncError, match=f"{extent.name}: live bits differ"):
            on_cores(move, cores)
        # A share writes back the old bits where it wrote, and nowhere else.
        assert same(flats, drifted)
        extent.live[at] ^= 1

    for move in staged:
        on_cores(move, cores)
    assert same(flats, expected)
    for move in staged:
        on_cores(move.reversed(), cores)
    assert same(flats, before)
