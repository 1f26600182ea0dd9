"""LoRA adapters by PEFT: layers around a frozen model, under names that PEFT's files have.

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

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import nn

from deltawire.config import AdapterConfig
from deltawire.errors import InputError
from deltawire.export.models import ADAPTER_CONFIG, check_directory, empty_model, load_model
from deltawire.placement.live import rename_published
from deltawire.quantization.experts import STACKS, ExpertAdapter, add_expert_adapter, find_experts
from deltawire.quantization.packing import load_packed, pack_layers
from deltawire.sync.huggingface.safetensors_layout import (
    SafetensorsLayout,
    encode_layout,
    weight_file,
)
from deltawire.sync.publish.model_files import LAYOUT
from deltawire.wire.run import TensorSpec

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's prefix of the names in `ADAPTER_WEIGHTS`; no name of the base begins so."""
EXPERTS = "experts"
"""The target that stands for every stack of fused experts."""
_NAME = "default"
_MERGED = ".merged"


def open_model(folder: Path, adapter: AdapterConfig) -> Any:
    """Returns the causal LM of a model's files with its adapter, weights unset; raises
    `InputError`.
    """
    return adapted(empty_model(folder), adapter, seed=0)


def adapted(model: Any, config: AdapterConfig, *, seed: int) -> Any:
    """Freezes ``model`` and wraps its linear layers with a LoRA adapter, in place; or returns it as
    it is if no adapter is configured.

    A is drawn from ``seed``, B is 0: the model computes what it did before. With ``config.packed``,
    experts and the layers that it names are replaced by packed ones without values. Raises
    `InputError` if PEFT is missing, a target is no layer of the model, or names its head.
    """
    if config.kind == "none":
        return model
    stacks = _stacks_of(config)
    # Without packing, stacks are looked for among the linear layers, and refused there.
    expert_names = () if config.packed == "none" else (EXPERTS, *STACKS)
    linear = [one for one in config.targets if one not in expert_names]
    packed_layers = linear_targets(model, config.packed_layers) if config.packed_layers else []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = _wrap_linear(model, config, linear) if linear else set()
        if config.packed != "none":
            names = [f"{one}.base_layer" if one in wrapped else one for one in packed_layers]
            pack_layers(model, config.packed, names)
        for experts in find_experts(model).values() if stacks else ():
            for name in stacks:
                if hasattr(experts, name):
                    scale = config.alpha / config.rank
                    shared = config.shared_factor
                    add_expert_adapter(experts, name, rank=config.rank, scale=scale, shared=shared)
    for name, parameter in model.named_parameters():
        if "lora_A" not in name and "lora_B" not in name:
            parameter.requires_grad_(False)
    rename_published(model, {name: _published(name) for name, _ in model.named_parameters()})
    return model


def load_adapted(folder: Path, config: AdapterConfig, *, seed: int) -> Any:
    """Loads the causal LM of a directory with its adapter; its frozen experts are packed, tensor by
    tensor, if the configuration says so. Raises `InputError`.
    """
    if config.packed == "none":
        return adapted(load_model(folder), config, seed=seed)
    check_directory(folder)
    model = adapted(empty_model(folder), config, seed=seed)
    load_packed(model, folder)
    return model


def _stacks_of(config: AdapterConfig) -> list[str]:
    """Returns the stacks of fused experts that a configuration's targets name."""
    named = [one for one in config.targets if one in (EXPERTS, *STACKS)]
    if config.packed == "none":
        return []
    return list(STACKS) if EXPERTS in named else named


def _wrap_linear(model: Any, config: AdapterConfig, names: Sequence[str]) -> set[str]:
    """Wraps linear layers with PEFT's; returns their names."""
    peft = _peft()
    targets = linear_targets(model, names)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        bias="none",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(settings, model, adapter_name=_NAME)
    wrapped = set(_wrapped(model))
    if wrapped != set(targets):
        odd = min(wrapped ^ set(targets))
        raise InputError(f"PEFT did not wrap the layers that were asked for: {odd[:200]}")
    return wrapped


def linear_targets(model: Any, targets: Sequence[str]) -> list[str]:
    """Full names of the linear layers that ``targets`` name by their last parts, in model order.

    Raises `InputError` for a target without a layer, for the head, and for fused experts.
    """
    head = model.get_output_embeddings()
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    usable = [name for name, module in linear.items() if module is not head]
    found: set[str] = set()
    for target in targets:
        if target == "all-linear":
            found.update(usable)
            continue
        matching = [name for name in linear if name == target or name.endswith(f".{target}")]
        if any(linear[name] is head for name in matching):
            raise InputError(
                f"train.adapter.targets: {target[:80]!r} is the head, which stays frozen",
                hint="leave it out",
            )
        if not matching:
            raise _no_layer(model, target, linear)
        found.update(matching)
    return [name for name in usable if name in found]


def _no_layer(model: Any, target: str, linear: Mapping[str, nn.Module]) -> InputError:
    stacks = [
        name.rpartition(".")[2]
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3
    ]
    last = target.rpartition(".")[2]
    if any(last in stack or stack in last for stack in stacks) or (
        stacks and last in ("experts", "gate_proj", "up_proj")
    ):
        return InputError(
            f"train.adapter.targets: {target[:80]!r} names fused experts of this model, which "
            "can have an adapter only if they are packed",
            hint='set train.adapter.packed, such as "int4-g32"; or name linear layers such as '
            "q_proj, k_proj, v_proj, o_proj",
        )
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    return InputError(
        f"train.adapter.targets: the model has no linear layer {target[:80]!r}",
        hint=f"it has {', '.join(kinds)[:300]}",
    )


def _published(name: str) -> str:
    for part in ("lora_A", "lora_B"):
        marker = f".{part}.{_NAME}."
        if marker in name:
            return PREFIX + name.replace(marker, f".{part}.")
        if name.endswith(f".{part}"):  # of a stack of experts
            return PREFIX + name.replace(".adapters.", ".")
    return name.replace(".base_layer.", ".")


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


def adapter_files(
    model: Any, config: AdapterConfig, specs: Sequence[TensorSpec], *, base: str
) -> dict[str, bytes]:
    """Files that make a pulled directory one that PEFT loads: `ADAPTER_CONFIG`, and the layout that
    puts the adapter's tensors into `ADAPTER_WEIGHTS` and the base's into ``model.safetensors``.

    ``base`` is where the base model came from, as PEFT names it.
    """
    layers = _wrapped(model)
    lasts = sorted({name.rpartition(".")[2] for name in layers})
    every = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or name in layers)
        and name.rpartition(".")[2] in lasts
        and ".base_layer" not in name
    ]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": lasts if sorted(every) == sorted(layers) else layers,
    }
    frozen = {spec.name: spec for spec in specs if not spec.name.startswith(PREFIX)}
    adapter = {spec.name: spec for spec in specs if spec.name.startswith(PREFIX)}
    layout = SafetensorsLayout(
        files=[
            weight_file("model.safetensors", frozen),
            weight_file(ADAPTER_WEIGHTS, adapter),
        ]
    )
    return {
        ADAPTER_CONFIG: json.dumps(settings, indent=2).encode() + b"\n",
        LAYOUT: encode_layout(layout),
    }


def _wrapped(model: Any) -> list[str]:
    """Returns the names of the layers that PEFT wrapped."""
    modules = model.named_modules()
    return [name for name, module in modules if hasattr(module, "_disable_adapters")]


class MergeReport(msgspec.Struct, frozen=True):
    """The part of an adapter's change that a merge kept: rounding to the base's dtype drops small
    changes.

    ``kept`` is the adapter's change that the merged weights contain, as a share (its projection);
    ``error`` the norm of the difference to the exact sum, relative to the change; ``changed`` the
    share of the merged layers' weights that differ from the base's.
    """

    layers: int
    kept: float
    error: float
    changed: float


def merge_directory(source: Path, out: Path) -> MergeReport:
    """Writes ``source``, a pulled directory with an adapter, to ``out`` as a plain model directory.

    A version that ``out`` holds already is replaced, once the new one is complete. Raises
    `InputError` if ``source`` has no adapter, or ``out`` is something else.
    """
    source = source.resolve()
    if not (source / ADAPTER_CONFIG).is_file():
        raise InputError(f"{source} has no adapter to merge", hint="its run trains the whole model")
    if out.exists() and not (out / _MERGED).is_file():
        raise InputError(f"{out} exists already", hint="name a new folder")
    settings = json.loads((source / ADAPTER_CONFIG).read_bytes())
    scale = settings["lora_alpha"] / settings["r"]
    adapter = safetensors.torch.load_file(source / ADAPTER_WEIGHTS)
    weights = safetensors.torch.load_file(source / "model.safetensors")
    sums = torch.zeros(3, dtype=torch.float64)
    layers = moved = elements = 0
    for name, down in adapter.items():
        if ".lora_A." not in name:
            continue
        up = adapter[name.replace(".lora_A.", ".lora_B.")]
        target = name.removeprefix(PREFIX).replace(".lora_A.", ".")
        if target not in weights:
            raise InputError(
                f"{target[:200]} is packed, and merging into packed weights is not possible yet",
                hint="pull without --merged",
            )
        base = weights[target]
        change = (up.float() @ down.float()) * scale
        merged = (base.float() + change).to(base.dtype)
        real = merged.float() - base.float()
        sums[0] += (real * change).sum(dtype=torch.float64)
        sums[1] += change.square().sum(dtype=torch.float64)
        sums[2] += (real - change).square().sum(dtype=torch.float64)
        moved += int((merged != base).sum())
        elements += base.numel()
        layers += 1
        weights[target] = merged
    _write_merged(source, out, weights)
    kept, whole, lost = sums.tolist()
    return MergeReport(
        layers,
        kept=kept / whole if whole else 1.0,
        error=(lost / whole) ** 0.5 if whole else 0.0,
        changed=moved / max(elements, 1),
    )


def _write_merged(source: Path, out: Path, weights: dict[str, torch.Tensor]) -> None:
    work = out.with_name(f".{out.name}.merging")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.suffix != ".safetensors" and file.name != ADAPTER_CONFIG:
            shutil.copyfile(file, work / file.name)
    safetensors.torch.save_file(weights, work / "model.safetensors", {"format": "pt"})
    (work / _MERGED).write_text("written by deltawire pull --merged\n")
    shutil.rmtree(out, ignore_errors=True)
    work.rename(out)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError(
            "train.adapter needs the package peft", hint="pip install 'deltawire[lora]'"
        ) from error
    return peft
