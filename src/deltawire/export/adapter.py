"""Wraps frozen models with PEFT's LoRA adapters, published under the names in PEFT's files.

A run holds the base's tensors and the adapter's: readers, mirrors and fsck treat them alike, the
digest of version 0 in run.json proves the base, and later versions change the adapter only. The
sampler builds the same wrapped model as the trainer and computes the same sums in the same order;
nothing is merged::

    base       model.layers.0.self_attn.q_proj.base_layer.weight
               published as model.layers.0.self_attn.q_proj.weight
    adapter    model.layers.0.self_attn.q_proj.lora_A.default.weight
               published as base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deltawire.config import AdapterConfig
from deltawire.config.adapters import matches
from deltawire.errors import InputError
from deltawire.export.models import check_directory, empty_model, load_model
from deltawire.placement.live import rename_published
from deltawire.quantization.experts import STACKS, ExpertAdapter, add_expert_adapter, find_experts
from deltawire.quantization.packing import load_packed, pack_layers

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's prefix of the names in `ADAPTER_WEIGHTS`; no name of the base begins with it."""
EXPERTS = "experts"
"""The target that names every stack of fused experts."""
_NAME = "default"


def open_model(folder: Path, adapter: AdapterConfig, *, seed: int = 0, meta: bool = False) -> Any:
    """Returns the causal LM of a model's files with its adapter, weights unset.

    ``seed`` is the run's for a trainer whose versions hold no adapter, which starts from it again.
    With ``meta``, weights have no memory (`empty_model`), unless they are packed. Nor has the
    adapter, so versions have to hold it. Raises `InputError`.
    """
    model = empty_model(folder, meta=meta and adapter.packed == "none")
    return adapted(model, adapter, seed=seed)


def adapted(model: Any, config: AdapterConfig, *, seed: int) -> Any:
    """Freezes ``model`` and add a LoRA adapter to its layers, in place; or return it as it is if no
    adapter is configured.

    A is drawn from ``seed``, B is 0: the model computes what it did before. With ``config.packed``,
    experts and the layers that it names are replaced by packed ones without values. Raises
    `InputError` if PEFT is missing, a target is no layer of the model, or a pattern matches none.
    """
    if config.kind == "none":
        return model
    linear, stacks = _targets_of(model, config)
    saved = _modules_named(model, config.modules_to_save, "modules_to_save")
    packed_layers = linear_targets(model, config.packed_layers) if config.packed_layers else []
    _check_patterns(config, [*linear, *(f"{module}.{stack}" for module, stack in stacks)])
    if both := sorted(set(saved) & {*linear, *packed_layers}):
        raise InputError(f"train.adapter.modules_to_save: {both[0]} is a target or packed too")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = _wrap_layers(model, config, linear) if linear else set()
        if config.packed != "none":
            names = [f"{one}.base_layer" if one in wrapped else one for one in packed_layers]
            pack_layers(model, config.packed, names)
        for module, stack in stacks:
            name = f"{module}.{stack}"
            add_expert_adapter(
                model.get_submodule(module),
                stack,
                rank=config.rank_of(name),
                scale=config.scale_of(name),
                shared=config.shared_factor,
            )
    for name in saved:
        parent, _, last = name.rpartition(".")
        wrapper = require_peft().utils.ModulesToSaveWrapper(model.get_submodule(name), _NAME)
        setattr(model.get_submodule(parent), last, wrapper)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_of_adapter(name))
    rename_published(model, {name: _published(name) for name, _ in model.named_parameters()})
    return model


def is_of_adapter(name: str) -> bool:
    """Returns whether a parameter, by its name in the module, is the adapter's and trained."""
    return ".lora_" in name or ".modules_to_save." in name


def load_adapted(
    folder: Path, config: AdapterConfig, *, seed: int, dtype: torch.dtype = torch.float32
) -> Any:
    """Loads the causal LM of a directory with its adapter; its frozen experts are packed, tensor by
    tensor, if the configuration says so. Raises `InputError`."""
    if config.packed == "none":
        model = adapted(load_model(folder, dtype=dtype), config, seed=seed)
    else:
        check_directory(folder)
        model = adapted(empty_model(folder), config, seed=seed)
        load_packed(model, folder)
        copy_saved_modules(model)
    return model


@torch.no_grad()
def copy_saved_modules(model: Any) -> None:
    """Sets the trained copies of modules to their originals."""
    for module in model.modules():
        if hasattr(module, "original_module"):
            module.modules_to_save[_NAME].load_state_dict(module.original_module.state_dict())


def _targets_of(model: Any, config: AdapterConfig) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the layers that PEFT wraps, and the stacks of experts by module and stack."""
    experts = find_experts(model)
    held = {stack for one in experts.values() for stack in STACKS if hasattr(one, stack)}
    wanted: set[str] = set()
    layers = []
    for target in config.targets:
        if target == EXPERTS and experts:
            wanted |= held
            continue
        if target in held:
            wanted.add(target)
            if not _named(model, target):
                continue
        layers.append(target)
    stacks = [
        (name, stack)
        for name, module in experts.items()
        for stack in STACKS
        if stack in wanted and hasattr(module, stack)
    ]
    return linear_targets(model, layers) if layers else [], stacks


def _check_patterns(config: AdapterConfig, names: Sequence[str]) -> None:
    """Raises `InputError` for a pattern that matches no layer of the adapter."""
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(matches(pattern, name) for name in names):
                raise InputError(
                    f"train.adapter.{key}: {pattern[:80]!r} matches no layer of the adapter",
                    hint=f"the first is {names[0] if names else 'missing: targets is empty'}",
                )


def _wrap_layers(model: Any, config: AdapterConfig, targets: Sequence[str]) -> set[str]:
    """Wraps linear layers and embeddings with PEFT's; returns their names."""
    peft = require_peft()
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(targets),
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
        use_rslora=config.use_rslora,
        bias="none",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(settings, model, adapter_name=_NAME)
    wrapped = set(wrapped_layers(model))
    if wrapped != set(targets):
        odd = min(wrapped ^ set(targets))
        raise InputError(f"PEFT did not wrap the requested layers: {odd[:200]}")
    for name in targets:
        layer = model.get_submodule(name)
        if isinstance(layer.base_layer, nn.Embedding):  # Its readers ask for the vocabulary's size.
            layer.num_embeddings = layer.base_layer.num_embeddings
    return wrapped


def linear_targets(model: Any, targets: Sequence[str]) -> list[str]:
    """Returns full names of the layers that ``targets`` name by their last parts, in model order.

    ``all-linear`` is every linear layer except the head; a name may also be that of the head or of
    an embedding. Raises `InputError` for a target without a layer, and for tied weights.
    """
    head = model.get_output_embeddings()
    found: set[str] = set()
    for target in targets:
        if target == "all-linear":
            found |= {
                name
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and module is not head
            }
        else:
            found.update(_modules_named(model, [target], "targets"))
    return [name for name, _ in model.named_modules() if name in found]


def _named(model: Any, target: str) -> list[str]:
    """Returns the linear layers and embeddings whose names end so, by whole parts."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        and (name == target or name.endswith(f".{target}"))
    ]


def _modules_named(model: Any, targets: Sequence[str], key: str) -> list[str]:
    """Returns full names of linear layers and embeddings; refuses missing and tied ones."""
    tied = model.get_input_embeddings().weight is getattr(
        model.get_output_embeddings(), "weight", None
    )
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    found = []
    for target in targets:
        matching = _named(model, target)
        if not matching:
            raise _no_layer(model, target, key)
        if tied and any(model.get_submodule(name) in ends for name in matching):
            raise InputError(
                f"train.adapter.{key}: {target[:80]!r} is tied: head and embedding of this model "
                "share one weight",
                hint="remove it from the targets",
            )
        found += matching
    return found


def _no_layer(model: Any, target: str, key: str) -> InputError:
    if find_experts(model) and target.rpartition(".")[2] in ("gate_proj", "up_proj"):
        return InputError(
            f"train.adapter.{key}: {target[:80]!r} is a part of fused experts of this model",
            hint='name the stack "gate_up_proj", or "experts" for all stacks',
        )
    kinds = sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding)
        }
    )
    return InputError(
        f"train.adapter.{key}: the model has no linear layer {target[:80]!r}",
        hint=f"it has {', '.join(kinds)[:300]}",
    )


def _published(name: str) -> str:
    for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        if f".{part}.{_NAME}" in name:
            return PREFIX + name.replace(f".{part}.{_NAME}", f".{part}")
        if name.endswith(f".{part}"):  # Of a stack of experts.
            return PREFIX + name.replace(".adapters.", ".")
    if ".modules_to_save." in name:
        return PREFIX + name.replace(f".modules_to_save.{_NAME}.", ".")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Lets the model compute without its adapter: the frozen base."""
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    stacks = [module for module in model.modules() if isinstance(module, ExpertAdapter)]
    # PEFT's own switch changes requires_grad too, and a graph may be waiting for its backward pass.
    for layer in layers:
        layer._disable_adapters = True
    for stack in stacks:
        stack.enabled = False
    try:
        yield
    finally:
        for stack in stacks:
            stack.enabled = True
        for layer in layers:
            layer._disable_adapters = False


def wrapped_layers(model: Any) -> list[str]:
    """Returns the names of the layers that PEFT wrapped with LoRA, in model order."""
    return [name for name, module in model.named_modules() if hasattr(module, "base_layer")]


def require_peft() -> Any:
    """Returns the package peft; raises `InputError` without it."""
    try:
        import peft
    except ImportError as error:
        raise InputError(
            "LoRA adapters need the package peft", hint="pip install 'deltawire[lora]'"
        ) from error
    return peft
