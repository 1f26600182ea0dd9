"""An exchange starts no thread for changes that one core writes sooner."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deltawire.placement import moves


@pytest.mark.parametrize(
    ("share", "threads"), [(0.0, 1), (0.5, 1), (1.0, 1), (2.0, 2), (3.0, 3), (9.0, 3)]
)
def test_threads_grow_with_the_changes_up_to_the_cores(monkeypatch, share, threads):
    each = 1 << 10
    monkeypatch.setattr(moves, "CHANGES_PER_THREAD", each)
    monkeypatch.setattr(moves, "cores", lambda: 3)
    native, given = moves._native, []

    def exchange(*arguments):
        given.append(arguments[-1])
        return native.exchange(*arguments)

    monkeypatch.setattr(moves, "_native", SimpleNamespace(exchange=exchange))
    count = max(1, round(share * each))
    flats = [torch.zeros(2 * count, dtype=torch.int16) for _ in range(2)]
    old, new = np.zeros(count, np.uint16), np.ones(count, np.uint16)
    index = np.arange(count, dtype=np.int64)
    (move,) = moves.stage([[], [(index, old, new)]], ["first", "second"], flats)
    move.exchange()
    assert given == [threads]
    assert flats[0].sum() == 0
    assert flats[1].tolist() == [1] * count + [0] * count
    move.reversed().exchange()
    assert flats[1].sum() == 0
