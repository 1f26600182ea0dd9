"""Dithering starts a run of a real model: it must not wait for other threads or compute indices."""

import pytest
import torch

from deltawire.train import dither as dithering
from deltawire.train.dither import dither

GRAIN = 32_768
"""Elements from which on torch divides an elementwise operation among threads."""


@pytest.fixture
def values():
    return torch.randn(96, 700).to(torch.bfloat16).float()


def test_operations_are_too_small_to_be_divided_among_threads():
    assert dithering._CHUNK_ON_CPU < GRAIN


@pytest.mark.parametrize(
    ("box", "offset", "mapped"),
    [
        ((96, 700), (0, 0), False),
        ((32, 700), (40, 0), False),
        ((96, 350), (0, 350), True),
        ((1, 700), (95, 0), False),
    ],
)
def test_consecutive_elements_need_no_map_and_every_part_is_as_in_the_whole(
    values, monkeypatch, box, offset, mapped
):
    calls = []
    real = dithering._in_whole
    monkeypatch.setattr(dithering, "_in_whole", lambda *a: calls.append(1) or real(*a))
    rows, columns = (slice(o, o + size) for o, size in zip(offset, box, strict=True))
    part = values[rows, columns].clone()
    dither(part, torch.bfloat16, seed=3, name="w", shape=tuple(values.shape), offset=offset)
    assert bool(calls) == mapped
    dither(values, torch.bfloat16, seed=3, name="w")
    assert torch.equal(part, values[rows, columns])
