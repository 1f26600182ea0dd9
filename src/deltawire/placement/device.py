"""Resolves a configured device name to a torch device of this machine."""

from __future__ import annotations

import re

import torch

from deltawire.errors import InputError

DEVICE_PATTERN = re.compile(r"(auto|cpu|mps|cuda(:[0-9]{1,3})?)\Z")


def resolve_device(name: str, *, index: int = 0) -> torch.device:
    """Returns the torch device that ``name`` asks for: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or
    ``mps``.

    ``auto`` is the first that this machine has of CUDA, MPS and the CPU. ``index`` counts processes
    that share the machine, such as trainer ranks: ``auto`` and ``cuda`` give each the next of the
    visible GPUs. Raises `InputError` if the machine does not have the device.

    Example::

        model.to(resolve_device(config.device_of("trainer"), index=local_rank))
    """
    if not DEVICE_PATTERN.match(name):
        raise InputError(f"unknown device {name[:80]!r}", hint="use auto, cpu, cuda, cuda:N or mps")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "mps" and not torch.backends.mps.is_available():
        raise InputError("device mps: this machine has no Metal device", hint='set device = "auto"')
    if not name.startswith("cuda"):
        return torch.device(name)
    if not gpus:
        reason = (
            "torch is installed without CUDA" if torch.version.cuda is None else "no GPU is visible"
        )
        raise InputError(f"device {name}: {reason}", hint='set device = "auto" or "cpu"')
    number = index % gpus if name == "cuda" else int(name.partition(":")[2])
    if number >= gpus:
        raise InputError(
            f"device {name}: this machine shows {gpus} GPUs, numbered from 0",
            hint="check CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", number)
