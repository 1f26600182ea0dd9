"""Names what the bits of a step depend on besides its inputs: tensor library and kernels."""

from __future__ import annotations

import os

import torch

ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Variables that restrict the kernels of libraries that torch calls."""


def arithmetic_of(device: torch.device) -> str:
    """Returns the release of torch and the kernels that it chooses on a device, with limits that
    the environment sets: two processes in which this is equal, and that have as many threads and
    ranks, make the same bits.

    Example::

        arithmetic_of(torch.device("cpu"))  # "torch 2.10.0+cpu, AVX512"
    """
    kernels = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        kernels = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    limits = [f"{name}={os.environ[name][:32]}" for name in ISA_LIMITS if os.environ.get(name)]
    return ", ".join([f"torch {torch.__version__}", kernels, *limits])[:256]
