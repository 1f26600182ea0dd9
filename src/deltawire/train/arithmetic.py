"""Names what the bits of a step depend on besides its inputs: tensor library and kernels."""

from __future__ import annotations

import os
from typing import Any

import torch

ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Variables that restrict the kernels of libraries that torch calls."""
SHORT_FLOATS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
"""Instructions by which oneDNN chooses its kernels for 16-bit products; torch's own name for the
kernels of a processor does not tell them apart."""


def arithmetic_of(device: torch.device) -> str:
    """Returns the release of torch and the kernels that it chooses on a device, with limits that
    the environment sets: two processes in which this is equal, and that have as many threads and
    ranks, make the same bits.

    Example::

        arithmetic_of(torch.device("cpu"))
        # "torch 2.13.0+cpu, AVX512, avx512_bf16, amx_bf16, Intel Xeon"
    """
    if device.type == "cuda":
        kernels = [torch.cuda.get_device_name(device), f"CUDA {torch.version.cuda}"]
    else:
        kernels = [torch.backends.cpu.get_cpu_capability(), *_processor()]
    limits = [f"{name}={os.environ[name][:32]}" for name in ISA_LIMITS if os.environ.get(name)]
    return ", ".join([f"torch {torch.__version__}", *kernels, *limits])[:256]


def _processor() -> list[str]:
    """Returns the instructions that oneDNN chooses by, and the processor's name, by which MKL
    does; nothing with a release of torch that does not tell."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    name = str(found.get("cpu_name", ""))[:64]
    return [one for one in [*(key for key in SHORT_FLOATS if found.get(key)), name] if one]
