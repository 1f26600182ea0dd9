"""Reads the tensors of a module under the names and shapes in its checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltawire.errors import InputError
from deltawire.placement.checkpoint_tensors import checkpoint_tensors
from deltawire.placement.live import saved_buffers

_LINEAR_OR_EMBEDDING = ("lora_A", "lora_embedding_A")
"""PEFT's attributes for the LoRA layers of each kind of layer."""


@torch.no_grad()
def tensors_of(
    model: Any, dtype: str | None = "bfloat16", *, keep: bool = True
) -> dict[str, Tensor]:
    """Returns the tensors of ``model``'s checkpoint, as contiguous CPU tensors.

    Floating-point parameters are rounded to ``dtype``; published in the float32 of a trainer's
    masters, every weight would change in every step. None keeps each dtype. Saved buffers keep
    theirs. Tied weights occur once. A model wrapped by PEFT gives its base with the active adapters
    added, and is not changed.

    Sharded tensors are gathered: all ranks must call this together. A rank that passes
    ``keep=False`` takes part in the gathering and returns nothing.

    Raises `InputError` for an unknown dtype, and for a model that no plain checkpoint can hold:
    adapters that are not LoRA or change more than a sum or one use of a tied weight, and quantized
    parameters.
    """
    dtype_named(dtype)
    base, added = _without_adapters(model)
    return _checkpoint_of(base, added, dtype, keep=keep)


@torch.no_grad()
def base_and_adapter_of(
    model: Any, dtype: str | None = "bfloat16", *, keep: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the frozen base of a model wrapped by PEFT, as `tensors_of` does without its adapter,
    and the adapter under the names of PEFT's files.

    Raises `InputError` for a model without one active LoRA adapter over a frozen base.
    """
    name = check_separable(model)
    return _checkpoint_of(model.get_base_model(), {}, dtype, keep=keep), adapter_of(
        model, name, dtype, keep=keep
    )


@torch.no_grad()
def adapter_of(model: Any, name: str, dtype: str | None, *, keep: bool = True) -> dict[str, Tensor]:
    """Returns the adapter ``name`` of a model wrapped by PEFT, as its files name the tensors."""
    import peft

    wanted = dtype_named(dtype)
    state = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    found = {}
    for key, tensor in state.items():
        value = _whole(tensor)
        if keep:
            value = value if wanted is None else value.to(wanted)
            found[key] = value.to("cpu").contiguous()
    return found


def check_separable(model: Any) -> str:
    """Returns the name of the adapter that can be published apart from its base; raises
    `InputError` if there is none."""
    if not hasattr(model, "get_base_model"):
        raise InputError(
            "the model has no adapter that could be published separately",
            hint="wrap it with PEFT's LoRA, or leave adapter out",
        )
    names = list(model.active_adapters)
    if len(names) != 1:
        raise InputError(f"{len(names)} adapters are active; one can be published separately")
    base = model.get_base_model()
    for name, module in base.named_modules():
        if hasattr(module, "modules_to_save"):
            raise InputError(
                f"{name} is trained whole next to the adapter", hint="publish the adapter merged"
            )
        if hasattr(module, "base_layer"):
            _check_adapter(name, module)
            if module.merged_adapters:
                raise InputError(f"the adapter of {name} is merged into the base: unmerge it first")
    for name, parameter in base.named_parameters():
        if parameter.requires_grad and ".lora_" not in name:
            raise InputError(
                f"{name} of the base is trained too", hint="freeze it, or publish merged"
            )
    return str(names[0])


def dtype_named(dtype: str | None) -> torch.dtype | None:
    """Returns torch's dtype of that name; raises `InputError` if there is none."""
    found = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(found, torch.dtype):
        raise InputError(f"there is no dtype {dtype[:40]!r}", hint='for example "bfloat16"')
    return found


def _checkpoint_of(
    base: Any, added: dict[str, Tensor], dtype: str | None, *, keep: bool
) -> dict[str, Tensor]:
    """Returns the tensors of ``base`` with what is ``added`` to its weights."""
    wanted = dtype_named(dtype)
    _check_ties(base)
    kept = set(saved_buffers(base))
    own = {name for name, _ in base.named_parameters()}
    tied = {name for name, _ in base.named_parameters(remove_duplicate=False)} - own
    state = {}
    for name, tensor in base.state_dict().items():
        plain = base_name(base, name)
        if name in tied or plain is None:
            continue
        _check_unquantized(name, tensor, adapted=plain in added)
        value = _whole(tensor)
        if plain in added:
            value = value.float() + _whole(added[plain]).float()
        if not keep:
            continue
        if wanted is not None and value.is_floating_point() and name not in kept:
            value = value.to(wanted)
        state[plain] = value.to("cpu").contiguous()
    return checkpoint_tensors(base, state) if keep else {}


def is_sharded(model: Any) -> bool:
    """Returns whether ranks hold parts of the model's parameters, which reading them gathers."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def unwrapped(model: Any) -> Any:
    """Returns the module inside the wrappers of a trainer: replicas (DDP) and compiled modules.

    Raises `InputError` for wrappers whose parameters do not have the module's names and shapes.
    """
    while True:
        kind = type(model).__name__
        if kind == "DistributedDataParallel":
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif kind == "FullyShardedDataParallel":
            raise InputError(
                "the model is sharded by FSDP version 1, which flattens its parameters",
                hint='use version 2: fsdp_config={"version": 2}, or fsdp_version: 2',
            )
        elif any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise InputError(
                "the model is partitioned by DeepSpeed ZeRO stage 3, which is not supported",
                hint="use ZeRO stage 2 or lower, or FSDP version 2",
            )
        else:
            return model


def _without_adapters(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """Returns the module inside PEFT's wrapper, and what its adapters add to each weight."""
    if not hasattr(model, "get_base_model"):
        return model, {}
    base = model.get_base_model()
    added: dict[str, Tensor] = {}
    for name, module in base.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        _check_adapter(name, module)
        for adapter in module.active_adapters:
            held = any(adapter in getattr(module, kind, ()) for kind in _LINEAR_OR_EMBEDDING)
            # The base's weight already contains a merged adapter.
            if held and adapter not in module.merged_adapters:
                delta = module.get_delta_weight(adapter)
                key = f"{name}.weight"
                added[key] = added[key] + delta if key in added else delta
    return base, added


def _check_adapter(name: str, module: Any) -> None:
    """Raises `InputError` unless the adapters of a layer only add to its weight."""
    variants = getattr(module, "lora_variant", {})
    if (
        hasattr(module, "get_delta_weight")
        and not hasattr(module, "parameter_name")
        and not any(adapter in variants for adapter in module.active_adapters)
        and not any(getattr(module, "lora_bias", {}).values())
    ):
        return
    raise InputError(
        f"{name} has an adapter that cannot be added to its weight",
        hint="LoRA adapters of linear and embedding layers can, without DoRA and biases",
    )


def _check_ties(base: Any) -> None:
    """Raises `InputError` for a tied weight of which only one use has an adapter or a trained copy:
    readers, which tie the two, would give it to both.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for group in names.values():
        if len(group) < 2:
            continue
        for name in group:
            if ".base_layer." in name or ".original_module." in name:
                others = ", ".join(other for other in group if other != name)
                raise InputError(
                    f"{name} has an adapter or a trained copy, and is tied to {others}",
                    hint="leave tied embeddings out of the adapter, or untie the base first",
                )


def base_name(base: Any, name: str) -> str | None:
    """Returns the name that a tensor has without PEFT's wrappers; None for an adapter's own tensor,
    and for the original of a module that PEFT trains as a copy.
    """
    if ".lora_" in name or ".original_module." in name:
        return None
    before, copied, after = name.partition(".modules_to_save.")
    if copied:
        adapter, _, after = after.partition(".")
        if adapter not in base.get_submodule(before).active_adapters:
            return None
        name = f"{before}.{after}"
    return name.replace(".base_layer.", ".")


def _check_unquantized(name: str, tensor: Tensor, *, adapted: bool) -> None:
    """Raises `InputError` for a quantized weight, whose stored values cannot be rounded or added
    to.
    """
    quantized = hasattr(tensor, "quant_state") or hasattr(tensor, "tensor_impl")
    if quantized or (adapted and not tensor.is_floating_point()):
        raise InputError(
            f"{name} is quantized, but a checkpoint needs its unquantized values",
            hint="load the base in bfloat16; an adapter over it trains in little more memory",
        )


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()
