"""Numbers of ranks that do not divide into their axes are refused by name."""

import pytest
import torch

from deltawire.config import TrainConfig, parse_config
from deltawire.errors import InputError
from deltawire.train.parallel import open_mesh


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"ranks": 3, "replicate": 2}, "3 ranks do not divide"),
        ({"ranks": 3, "tensor_parallel": 2}, "3 ranks do not divide into tensor_parallel = 2"),
        ({"ranks": 6, "replicate": 2, "tensor_parallel": 2}, "replicate = 2 copies and tensor_par"),
        ({"ranks": 4, "expert_parallel": 3}, "expert_parallel = 3 does not divide the 4 ranks"),
        ({"ranks": 4, "tensor_parallel": 2, "expert_parallel": 4}, "does not divide the 2 ranks"),
    ],
)
def test_axes_that_do_not_divide_are_refused(train, message):
    with pytest.raises(InputError, match=message) as raised:
        parse_config({"name": "x", "train": train}, source="test")
    assert raised.value.hint


def test_the_launchers_number_of_ranks_counts(monkeypatch):
    """A torchrun of three ranks cannot hold two replicas, whatever the configuration expected."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="3 ranks do not divide"):
        open_mesh(TrainConfig(ranks=2, replicate=2), torch.device("cpu"))
