"""Ranks that do not divide into their axes, and models that do not divide, are refused by name."""

from types import SimpleNamespace

import families
import pytest
import torch

from deltawire.config import TrainConfig, parse_config
from deltawire.errors import InputError
from deltawire.train.parallel import expert_parallel, open_mesh, tensor_parallel


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


def mesh_of(size):
    """As much of a mesh as a refusal asks for."""
    return SimpleNamespace(size=lambda: size)


@pytest.mark.parametrize(
    ("family", "sizes", "ranks", "message"),
    [
        ("gpt_oss", {}, 2, "no plan to divide the layers of GptOssForCausalLM"),
        ("qwen3", {}, 4, "does not divide the 2 attention heads"),
        ("qwen3", {"num_attention_heads": 4}, 4, "does not divide the 2 key/value heads"),
        ("qwen3", {"intermediate_size": 47}, 2, "does not divide the 47 outputs of"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(monkeypatch, family, sizes, ranks, message):
    monkeypatch.setattr(tensor_parallel, "parallelize_module", lambda *_, **__: None)
    monkeypatch.setattr(tensor_parallel, "_placed", lambda parameter, *_: parameter)
    with pytest.raises(InputError, match=message) as raised:
        tensor_parallel.divide_layers(families.build(family, **sizes), mesh_of(ranks))
    assert "train.tensor_parallel" in raised.value.hint


@pytest.mark.parametrize(
    ("family", "ranks", "message"),
    [
        ("qwen3", 2, "Qwen3ForCausalLM has no experts that can be divided"),
        ("olmoe", 3, "8 experts of model.layers.0.mlp.experts do not divide over 3 ranks"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(family, ranks, message):
    mesh = SimpleNamespace(expert=mesh_of(ranks), tensor=None, divides_experts=mesh_of(ranks))
    with pytest.raises(InputError, match=message) as raised:
        expert_parallel.divide_experts(families.build(family), mesh)
    assert "train.expert_parallel" in raised.value.hint
