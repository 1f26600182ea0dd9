"""Devices by their configured names, on machines with and without accelerators."""

from types import SimpleNamespace

import pytest
import torch

from deltawire.config import parse_config
from deltawire.errors import InputError
from deltawire.placement import device as module
from deltawire.placement.device import resolve_device


def machine(monkeypatch, *, gpus=0, mps=False, cuda_build="13.0"):
    """Have the module see a machine with so many GPUs, with or without Metal."""
    fake = SimpleNamespace(
        device=torch.device,
        cuda=SimpleNamespace(is_available=lambda: gpus > 0, device_count=lambda: gpus),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps)),
        version=SimpleNamespace(cuda=cuda_build),
    )
    monkeypatch.setattr(module, "torch", fake)


@pytest.mark.parametrize(
    ("gpus", "mps", "name", "index", "expected"),
    [
        (0, False, "auto", 3, "cpu"),
        (0, True, "auto", 0, "mps"),
        (2, False, "auto", 0, "cuda:0"),
        (2, False, "auto", 3, "cuda:1"),
        (2, False, "cuda", 1, "cuda:1"),
        (2, False, "cuda:0", 1, "cuda:0"),
        (2, False, "cpu", 1, "cpu"),
    ],
)
def test_a_name_resolves_to_the_machines_device(monkeypatch, gpus, mps, name, index, expected):
    machine(monkeypatch, gpus=gpus, mps=mps)
    assert resolve_device(name, index=index) == torch.device(expected)


@pytest.mark.parametrize(
    ("gpus", "build", "name", "message"),
    [
        (0, None, "cuda", "without CUDA"),
        (0, "13.0", "cuda:1", "no GPU is visible"),
        (2, "13.0", "cuda:2", "shows 2 GPUs"),
        (2, "13.0", "mps", "no Metal"),
        (2, "13.0", "tpu", "unknown device"),
    ],
)
def test_an_absent_device_is_a_clear_error(monkeypatch, gpus, build, name, message):
    machine(monkeypatch, gpus=gpus, cuda_build=build)
    with pytest.raises(InputError, match=message) as raised:
        resolve_device(name)
    assert raised.value.hint


def test_each_role_has_the_runs_device_or_one_of_its_own():
    config = parse_config(
        {"name": "x", "device": "cpu", "rollout": {"device": "cuda:1"}}, source="test"
    )
    assert config.device_of("trainer") == "cpu"
    assert config.device_of("worker") == "cuda:1"
    assert config.device_of("evaluator") == "cpu"
    with pytest.raises(InputError, match="device"):
        parse_config({"name": "x", "device": "gpu"}, source="test")
