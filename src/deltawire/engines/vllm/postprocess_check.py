"""What vLLM makes of weights behind their loader, noticed.

Some kernels want weights in an order of their own: halves exchanged, rows shuffled, values
quantised. vLLM brings them into it once they are loaded, often in place. Who then writes where the
loader writes puts right bits in wrong places, and no digest of them would say so. So each parameter
is summed up before and afterwards; `refusals` refuses a model whose weights did not stay as loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

import torch

from deltawire.engines.vllm.settings import in_use_here
from deltawire.placement.elements import CARRIER

_NOTED = "_deltawire_remade"
"""Where a model keeps what was noted of it."""

_AT_ONCE = 1 << 22
_ODD = 0x1E3779B97F4A7C15


class Outline(NamedTuple):
    """A parameter, and the sum of its bits, each times an odd number that its place gives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sum: int


def watch() -> None:
    """Note what becomes of each model that this process loads for deltawire."""
    from vllm.model_executor.model_loader import base_loader, utils

    noting = _noting(utils.process_weights_after_loading)
    utils.process_weights_after_loading = noting
    base_loader.process_weights_after_loading = noting


def remade(model: torch.nn.Module) -> dict[str, str] | None:
    """Parameters of several elements that vLLM has changed since they were loaded, and how; None
    if nobody watched."""
    found: dict[str, str] | None = model.__dict__.get(_NOTED)
    return found


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def process_weights_after_loading(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not in_use_here():
            original(model, *args, **kwargs)
            return
        before = outlines(model)
        original(model, *args, **kwargs)
        model.__dict__[_NOTED] = differences(before, outlines(model))

    return process_weights_after_loading


@torch.no_grad()
def outlines(model: torch.nn.Module) -> dict[str, Outline]:
    """All parameters of ``model`` that have memory, by name."""
    return {
        name: Outline(tuple(held.shape), held.dtype, _sum_of(held.detach()))
        for name, held in model.named_parameters(remove_duplicate=False)
        if held.layout == torch.strided and held.device.type != "meta"
    }


def differences(before: Mapping[str, Outline], after: Mapping[str, Outline]) -> dict[str, str]:
    """Which parameters of more than one element changed, and how."""
    found = {}
    for name, old in before.items():
        new = after.get(name)
        if old == new or torch.Size(old.shape).numel() < 2:
            continue
        if new is None:
            found[name] = "is gone"
        elif (old.shape, old.dtype) != (new.shape, new.dtype):
            found[name] = f"became {list(new.shape)} of {str(new.dtype).removeprefix('torch.')}"
        else:
            found[name] = "holds other bits, or in another order"
    return found


def _sum_of(held: torch.Tensor) -> int:
    """Modulo 2^64. Allocates some times `_AT_ONCE`, and once the parameter if it has holes."""
    bits = held.contiguous().view(-1).view(CARRIER[held.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=held.device)
    for first in range(0, bits.numel(), _AT_ONCE):
        part = bits[first : first + _AT_ONCE].to(torch.int64)
        places = torch.arange(first, first + part.numel(), device=held.device)
        total += ((part + 1) * ((places * _ODD) | 1)).sum()
    return int(total)
