"""Reads the tensors of a module under the names and shapes that its checkpoints have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltawire.errors import InputError
from deltawire.placement.live import saved_buffers
from deltawire.placement.module_loader import checkpoint_tensors


@torch.no_grad()
def tensors_of(model: Any, dtype: str | None = "bfloat16") -> dict[str, Tensor]:
    """Return what a checkpoint of ``model`` holds, as contiguous CPU tensors.

    Floating-point parameters are rounded to ``dtype``, whatever the trainer holds: published in the
    float32 of a trainer's masters, every weight would change in every step. None keeps each dtype.
    Saved buffers keep theirs. Tied weights occur once. Sharded tensors are gathered: all ranks must
    call this together. A model wrapped by PEFT gives its base with the active adapters added, and
    is not changed.

    Raises `InputError` for an unknown dtype, and for adapters other than LoRA.
    """
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise InputError(f"there is no dtype {dtype[:40]!r}", hint='for example "bfloat16"')
    wanted = None if dtype is None else getattr(torch, dtype)
    base, added = _without_adapters(model)
    kept = set(saved_buffers(base))
    own = {name for name, _ in base.named_parameters()}
    tied = {name for name, _ in base.named_parameters(remove_duplicate=False)} - own
    state = {}
    for name, tensor in base.state_dict().items():
        plain = name.replace(".base_layer.", ".")
        if name in tied or ".lora_" in name:
            continue
        value = _whole(tensor)
        if plain in added:
            value = value.float() + _whole(added[plain]).float()
        if wanted is not None and value.is_floating_point() and name not in kept:
            value = value.to(wanted)
        state[plain] = value.to("cpu").contiguous()
    return checkpoint_tensors(base, state)


def _without_adapters(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the module inside PEFT's wrapper, and what its adapters add to each weight."""
    if not hasattr(model, "get_base_model"):
        return model, {}
    base = model.get_base_model()
    added: dict[str, Tensor] = {}
    for name, module in base.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        if not hasattr(module, "get_delta_weight"):
            raise InputError(
                f"{name} has an adapter that cannot be added to its weight",
                hint="LoRA adapters of linear layers can",
            )
        for adapter in module.active_adapters:
            if adapter in module.lora_A:
                delta = module.get_delta_weight(adapter)
                key = f"{name}.weight"
                added[key] = added[key] + delta if key in added else delta
    return base, added


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()
