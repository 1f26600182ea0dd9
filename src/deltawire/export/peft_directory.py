"""Reads and writes adapters as PEFT does: `ADAPTER_CONFIG` and `ADAPTER_WEIGHTS`.

A run holds an adapter in the shapes that it is computed in. They are PEFT's, but for experts, whose
stacks PEFT (``target_parameters``) flattens to matrices. E experts, r rank::

    in a run      ….experts.gate_up_proj.lora_A             [E, r, inputs]
                  ….experts.gate_up_proj.lora_B             [E, outputs, r]
    in the file   ….experts.base_layer.lora_A.weight        [E · r, inputs]     by expert
                  ….experts.base_layer.lora_B.weight        [outputs, r · E]    by rank
                  ….experts.lora_A.weight                   of down_proj, as the last stack

PEFT nests a wrapper for each stack of a module, the first one innermost, and names no stack. So
every tensor is checked against the shapes of the base, and nothing is read by position: PEFT before
0.19.1 took the inputs of a stack for its outputs, and such a file is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from deltawire.config import AdapterConfig
from deltawire.errors import InputError
from deltawire.export.adapter import ADAPTER_WEIGHTS, PREFIX, wrapped_layers
from deltawire.export.models import ADAPTER_CONFIG
from deltawire.placement.live import module_tensors
from deltawire.quantization.experts import STACKS, ExpertAdapter, find_experts, stack_shape
from deltawire.sync.huggingface.safetensors_layout import (
    SafetensorsLayout,
    encode_layout,
    weight_file,
)
from deltawire.sync.publish.model_files import LAYOUT
from deltawire.wire.run import TensorSpec

SWAPPED_BEFORE = (0, 19, 1)
"""The first release of PEFT that takes a stack's inputs and outputs from the module."""
_READABLE = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "layer_replication": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
}
"""Members of `ADAPTER_CONFIG` with the one value each that can be read; they may be absent."""


class _Stack(NamedTuple):
    """An adapter of one stack of experts, with the prefix of its two tensors in PEFT's file."""

    run_name: str
    file_name: str
    module: Any
    stack: str
    adapter: ExpertAdapter


def _stacks(model: Any) -> Iterator[_Stack]:
    for name, module in find_experts(model).items():
        adapters = getattr(module, "adapters", {})
        held = [stack for stack in STACKS if stack in adapters]
        for place, stack in enumerate(held):
            nested = ".base_layer" * (len(held) - 1 - place)
            file_name = f"{PREFIX}{name}{nested}"
            yield _Stack(f"{PREFIX}{name}.{stack}", file_name, module, stack, adapters[stack])


def peft_settings(model: Any, config: AdapterConfig, *, base: str) -> dict[str, Any]:
    """Returns the members of ``adapter_config.json`` for a model with its adapter.

    ``base`` is where the base model came from, as PEFT names it.
    """
    layers = wrapped_layers(model)
    stacks = [one.run_name.removeprefix(PREFIX) for one in _stacks(model)]
    # PEFT takes a name for every layer that ends so, and short names of some linear layers of a
    # mixture of experts for those of its stacks.
    lasts = sorted({name.rpartition(".")[2] for name in layers})
    every = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Linear | torch.nn.Embedding) or name in layers)
        and name.rpartition(".")[2] in lasts
        and ".base_layer" not in name
        and ".lora_" not in name
    ]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0 if stacks else config.dropout,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "use_rslora": config.use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": lasts if sorted(every) == sorted(layers) else layers,
        "target_parameters": stacks or None,
        "modules_to_save": _saved_modules(model) or None,
        "peft_version": ".".join(map(str, SWAPPED_BEFORE)),
    }


def _saved_modules(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "original_module")]


def to_peft(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the adapter's tensors of a run as PEFT's file holds them.

    ``tensors`` are by their names in the run; those of the base are left out.
    """
    found = {name: one for name, one in tensors.items() if name.startswith(PREFIX)}
    for one in _stacks(model):
        first, second = (found.pop(f"{one.run_name}.{part}") for part in ("lora_A", "lora_B"))
        count, outputs, inputs = stack_shape(one.module, one.stack)
        rank = first.shape[1]
        first, second = first.expand(count, -1, -1), second.expand(count, -1, -1)
        found[f"{one.file_name}.lora_A.weight"] = first.reshape(count * rank, inputs)
        found[f"{one.file_name}.lora_B.weight"] = second.permute(1, 2, 0).reshape(
            outputs, rank * count
        )
    return {name: tensor.contiguous() for name, tensor in sorted(found.items())}


def write_peft(
    folder: Path, model: Any, config: AdapterConfig, tensors: Mapping[str, Tensor], *, base: str
) -> None:
    """Writes a directory that PEFT's ``from_pretrained`` reads: ``tensors`` as `to_peft` takes
    them."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = peft_settings(model, config, base=base)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    safetensors.torch.save_file(to_peft(model, tensors), folder / ADAPTER_WEIGHTS, {"format": "pt"})


def adapter_files(
    model: Any, config: AdapterConfig, specs: Sequence[TensorSpec], *, base: str
) -> dict[str, bytes]:
    """Returns the files that make a pulled directory one that PEFT loads: `ADAPTER_CONFIG`, and the
    layout that puts the adapter's tensors into `ADAPTER_WEIGHTS` and the base's into
    ``model.safetensors``.

    With adapters of experts, which a run holds in other shapes than PEFT, there is no
    `ADAPTER_CONFIG`, so that PEFT reads no half of an adapter.
    """
    files = {LAYOUT: adapter_layout(specs)}
    if not any(True for _ in _stacks(model)):
        settings = peft_settings(model, config, base=base)
        files[ADAPTER_CONFIG] = json.dumps(settings, indent=2).encode() + b"\n"
    return files


def adapter_layout(specs: Sequence[TensorSpec]) -> bytes:
    """Returns the layout that puts an adapter's tensors into `ADAPTER_WEIGHTS` and those of its
    base into ``model.safetensors``."""
    frozen = {spec.name: spec for spec in specs if not spec.name.startswith(PREFIX)}
    adapter = {spec.name: spec for spec in specs if spec.name.startswith(PREFIX)}
    layout = SafetensorsLayout(
        files=[
            weight_file(name, held)
            for name, held in (("model.safetensors", frozen), (ADAPTER_WEIGHTS, adapter))
            if held
        ]
    )
    return encode_layout(layout)


@torch.no_grad()
def load_peft(model: Any, config: AdapterConfig, folder: Path) -> None:
    """Sets a model's adapter to that of a directory in PEFT's format.

    Raises `InputError` if the directory's ranks, scales or layers are not those of ``config``, if a
    tensor does not fit the base or has its axes swapped, and for what cannot be read: DoRA, biases,
    other methods than LoRA, and weights that are no safetensors.
    """
    settings = _read_settings(folder)
    stored = _read_tensors(folder)
    _check_scales(model, config, settings, folder)
    held = module_tensors(model)
    wanted = {name: one for name, one in held.items() if name.startswith(PREFIX)}
    values: dict[str, Tensor] = {}
    for one in _stacks(model):
        first, second = _take_stack(one, stored, settings, folder)
        values[f"{one.run_name}.lora_A"] = _shared(one, "lora_A", first, folder)
        values[f"{one.run_name}.lora_B"] = _shared(one, "lora_B", second, folder)
    for name in wanted.keys() - values.keys():
        values[name] = _take(stored, name, tuple(wanted[name].shape), folder)
    _check_rest(stored, held, folder)
    for name, tensor in wanted.items():
        tensor.copy_(values[name])


def _read_settings(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{folder} holds no adapter: {ADAPTER_CONFIG} cannot be read",
            hint="give a directory that PEFT's save_pretrained wrote",
        ) from error
    if not isinstance(settings, dict):
        raise InputError(f"{file} is not a JSON object")
    for key, value in _READABLE.items():
        if settings.get(key, value) not in (value, None):
            raise InputError(
                f"{file}: {key} = {str(settings[key])[:80]} cannot be read",
                hint="LoRA without biases, DoRA and other variants can",
            )
    return settings


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise InputError(
            f"{folder} has no {ADAPTER_WEIGHTS}",
            hint="save the adapter with safe_serialization, which is PEFT's default",
        )
    try:
        return safetensors.torch.load_file(file)
    except Exception as error:  # the library raises whatever its parser does
        raise InputError(f"{file} cannot be read: {str(error)[:200]}") from error


def _check_scales(
    model: Any, config: AdapterConfig, settings: Mapping[str, Any], folder: Path
) -> None:
    """Raises `InputError` if a layer has another rank or scale in the directory."""
    try:
        stored = AdapterConfig(
            kind="lora",
            rank=int(settings.get("r", 8)),
            alpha=float(settings.get("lora_alpha", 8)),
            rank_pattern=dict(settings.get("rank_pattern") or {}),
            alpha_pattern=dict(settings.get("alpha_pattern") or {}),
            use_rslora=bool(settings.get("use_rslora", False)),
        )
        stacks = [one.run_name.removeprefix(PREFIX) for one in _stacks(model)]
        for name in [*wrapped_layers(model), *stacks]:
            ours = (config.rank_of(name), config.scale_of(name))
            theirs = (stored.rank_of(name), stored.scale_of(name))
            if ours != theirs:
                raise InputError(
                    f"the adapter in {folder} has rank {theirs[0]} and scale {theirs[1]:g} at "
                    f"{name}, train.adapter rank {ours[0]} and scale {ours[1]:g}",
                    hint=f"set rank = {stored.rank}, alpha = {stored.alpha:g}, use_rslora = "
                    f"{str(stored.use_rslora).lower()}, and the patterns of {ADAPTER_CONFIG}",
                )
    except (TypeError, ValueError, re.error) as error:
        raise InputError(f"{folder / ADAPTER_CONFIG} has settings of a wrong kind") from error


def _take(stored: dict[str, Tensor], name: str, shape: tuple[int, ...], folder: Path) -> Tensor:
    """Removes a tensor from ``stored`` and return it, if it has that shape."""
    found = stored.pop(name, None)
    if found is None:
        raise InputError(
            f"the adapter in {folder} lacks {name[:200]}",
            hint="name its target_modules in train.adapter.targets, or use its base model",
        )
    if tuple(found.shape) != shape:
        raise _misfit(folder, name, found, shape)
    if not bool(torch.isfinite(found).all()):
        raise InputError(f"the adapter in {folder} holds NaN or infinity in {name[:200]}")
    return found.float()


def _misfit(folder: Path, name: str, found: Tensor, shape: tuple[int, ...]) -> InputError:
    swapped = tuple(reversed(found.shape)) == shape
    return InputError(
        f"the adapter in {folder} does not fit the base: {name[:200]} is {list(found.shape)}, "
        f"expected {list(shape)}" + (", so its axes are swapped" if swapped else ""),
        hint="save it again with the layout of PEFT" if swapped else "use the base of the adapter",
    )


def _take_stack(
    one: _Stack, stored: dict[str, Tensor], settings: Mapping[str, Any], folder: Path
) -> tuple[Tensor, Tensor]:
    """Removes the two tensors of a stack's adapter and return them as a run holds them."""
    count, outputs, inputs = stack_shape(one.module, one.stack)
    rank = one.adapter.lora_A.shape[1]
    first, second = (f"{one.file_name}.lora_{part}.weight" for part in "AB")
    flat = (count * rank, inputs), (outputs, rank * count)
    shapes = [tuple(stored[name].shape) for name in (first, second) if name in stored]
    old = not one.module.is_transposed and _release(settings) < SWAPPED_BEFORE
    # With as many inputs as outputs both orders fit, and only the release tells them apart.
    swapped = shapes == [(count * rank, outputs), (inputs, rank * count)]
    if swapped and (inputs != outputs or old):
        raise InputError(
            f"the adapter in {folder} has the axes of {one.run_name[:200]} swapped: "
            f"{list(shapes[0])} and {list(shapes[1])}, expected {list(flat[0])} and "
            f"{list(flat[1])}",
            hint="PEFT before 0.19.1 wrote stacks of experts so; train it with a later release",
        )
    a = _take(stored, first, flat[0], folder)
    b = _take(stored, second, flat[1], folder)
    return (
        a.reshape(count, rank, inputs),
        b.reshape(outputs, rank, count).permute(2, 0, 1).contiguous(),
    )


def _release(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the release of PEFT that wrote a directory; the first one if it does not say."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(settings.get("peft_version") or ""))
    return tuple(int(one or 0) for one in numbers.groups()) if numbers else (0, 0, 0)


def _shared(one: _Stack, part: str, value: Tensor, folder: Path) -> Tensor:
    """Returns a stack's factor as the model holds it: once, if all experts share it."""
    if len(one.adapter.get_parameter(part)) == len(value):
        return value
    if not bool((value == value[:1]).all()):
        raise InputError(
            f"the adapter in {folder} has another {part} for each expert of {one.run_name[:200]}",
            hint="set train.adapter.shared_factor = false",
        )
    return value[:1]


def _check_rest(stored: dict[str, Tensor], held: Mapping[str, Tensor], folder: Path) -> None:
    """Raises `InputError` for tensors that the configured adapter has no place for.

    PEFT stores the embedding that an adapter wraps too: it has to be the base's.
    """
    for name, tensor in stored.items():
        base = held.get(name.removeprefix(PREFIX).replace(".base_layer.", "."))
        if ".base_layer." in name and ".lora_" not in name and base is not None:
            # The base may be held in another precision than the directory's.
            same = base.shape == tensor.shape and torch.equal(
                base.detach().cpu().to(tensor.dtype), tensor
            )
            if same:
                continue
            raise InputError(
                f"the adapter in {folder} is of another base: {name[:200]} differs",
                hint="set model.path to the model that it was trained on",
            )
        raise InputError(
            f"the adapter in {folder} has {name[:200]}, and train.adapter has no such layer",
            hint="name it in train.adapter.targets or modules_to_save, or use the adapter's base",
        )
