"""The ways of devices, also where there is none: on the CPU, Triton's kernels are interpreted."""

import pytest
import torch

from deltawire.placement import moves, placed

BACKENDS = ["torch", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernels_named(backend):
    """The kernels of a backend, None for torch only; skips where Triton cannot be had."""
    if backend == "torch":
        return None
    pytest.importorskip("triton")
    from deltawire.placement.triton_kernels import TritonKernels

    return TritonKernels()


def take_for_device(monkeypatch, backend):
    """Have live tensors on the CPU handled as a device's are."""
    kernels = kernels_named(backend)
    for module in (placed, moves):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
        monkeypatch.setattr(module, "kernels_of", lambda device: kernels)
