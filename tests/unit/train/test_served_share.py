"""The served share: sampled sums equal those over all elements, and no rank counts twice."""

import pytest
import torch

from deltawire.train.parallel import whole_mesh
from deltawire.train.served_share import SAMPLED, ServedShares


def alone():
    return whole_mesh(torch.device("cpu"))


def slowly(start, now):
    """The twin: float64 sums over all elements."""
    moved = {name: now[name].double() - start[name].double() for name in start}
    served = {name: now[name].bfloat16().double() - start[name].bfloat16().double() for name in now}
    along = sum(float((served[name] * moved[name]).sum()) for name in start)
    return along / sum(float(one.square().sum()) for one in moved.values())


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-2])
def test_samples_give_the_share_of_all_elements(size):
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.layers.0.w": (256, 512), "model.layers.1.w": (3,), "norm.weight": (512,)}
    start = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    shares = ServedShares(start, start.items(), torch.bfloat16, since=4)
    now = {
        name: one + torch.randn(one.shape, generator=generator) * size
        for name, one in start.items()
    }
    found = shares.measure(now, alone())
    assert found.since == 4
    assert found.share == pytest.approx(slowly(start, now), abs=0.1)
    assert found.layers.keys() == {"layers.0", "layers.1", "norm"}
    assert sum(one.numel() for one in shares._starts.values()) < 3 * SAMPLED


def test_small_tensors_are_counted_whole():
    start = {"a": torch.tensor([1.0, 2.0, 3.0])}
    shares = ServedShares(start, start.items(), torch.bfloat16, since=0)
    now = {"a": torch.tensor([1.001, 2.0, 3.02])}
    assert shares.measure(now, alone()).share == pytest.approx(slowly(start, now), rel=1e-9)
    assert shares.measure(start, alone()) is None, "nothing moved"
