"""Packs a model's frozen weights, and reads a directory into it without a bf16 copy.

Experts and linear layers are replaced by packed ones without values first; then each tensor of the
directory is read, packed if it is not yet, and copied, one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltawire.errors import InputError
from deltawire.quantization.checkpoints import PackedCheckpoint, StoredWeight
from deltawire.quantization.dequantize import dequantize, squared_error
from deltawire.quantization.experts import STACKS, find_experts, replace_stacks
from deltawire.quantization.formats import PackedFormat, Parts, naming
from deltawire.quantization.linear import PackedLinear, PackedWeight

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_REPORT = "_deltawire_pack_report"
_HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


@dataclass
class PackReport:
    """The tensors that were packed while a directory was read, and those that kept their codes.

    ``native`` counts stored tensors that were packed in the directory and kept their codes.
    """

    native: int = 0
    squares: dict[str, list[float]] = field(default_factory=dict)
    """‖dequantized − weight‖² and ‖weight‖² of what was packed here, by the layer's name."""

    @property
    def errors(self) -> dict[str, float]:
        """The relative error (Frobenius) of each layer that was packed here: a stack of experts, or
        a linear layer."""
        return {
            name: math.sqrt(difference / norm) if norm else 0.0
            for name, (difference, norm) in self.squares.items()
        }

    def add(self, name: str, form: PackedFormat, weight: Tensor, parts: Parts) -> None:
        """Counts a tensor of layer ``name`` that was packed as ``parts``."""
        total = self.squares.setdefault(name, [0.0, 0.0])
        for place, square in enumerate(squared_error(form, weight, parts)):
            total[place] += square


def pack_layers(model: Any, form: str, linear: Iterable[str] = ()) -> None:
    """Replaces fused experts, and linear layers of those names, by packed ones without values.

    ``linear`` has full names of modules. Raises `InputError` if nothing is left to pack.
    """
    experts = find_experts(model)
    for name, module in experts.items():
        with naming(name):
            replace_stacks(module, form)
    names = list(linear)
    for name in names:
        parent, _, last = name.rpartition(".")
        layer = model.get_submodule(name)
        with naming(name):
            weight = PackedWeight(form, tuple(layer.weight.shape), device=layer.weight.device)
        setattr(model.get_submodule(parent), last, PackedLinear(weight, layer.bias))
    if not experts and not names:
        raise InputError(
            "the model has no fused experts to pack",
            hint='name linear layers to pack, or set train.adapter.packed = "none"',
        )


@torch.no_grad()
def load_packed(model: Any, folder: Path) -> PackReport:
    """Reads a directory into a model whose layers were replaced by `pack_layers`.

    Packed tensors of the same format keep their codes; other tensors are packed. Raises
    `InputError` if the directory lacks a tensor of the model, and `CorruptError` for damage.
    """
    report = PackReport()
    targets = _targets(model)
    with PackedCheckpoint(folder) as checkpoint:
        for stored in checkpoint.weights():
            _fill(targets, checkpoint, stored, report)
    for name, target in targets.items():
        if target.filled != target.pieces:
            what = "incomplete" if target.filled else "missing"
            raise InputError(
                f"the weights in {folder} do not fit its config.json: {name} is {what}"
            )
    setattr(model, _REPORT, report)
    return report


def report_of(model: Any) -> PackReport:
    """Returns the report of the directory that a model was read from; an empty one if none was."""
    found: PackReport = getattr(model, _REPORT, PackReport())
    return found


@dataclass
class _Target:
    """A tensor of the model, and the number of stored pieces that filled it."""

    held: Any
    pieces: int
    transposed: bool = False
    filled: int = 0


def _targets(model: Any) -> dict[str, _Target]:
    """Every tensor to fill, by its name in a plain checkpoint."""
    found: dict[str, _Target] = {}
    for name, module in find_experts(model).items():
        for stack in STACKS:
            held = getattr(module, stack, None)
            if isinstance(held, PackedWeight):
                halves = 2 if stack == "gate_up_proj" else 1
                found[f"{name}.{stack}"] = _Target(
                    held, halves * held.shape[0], transposed=bool(module.is_transposed)
                )
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found[f"{_checkpoint_name(name)}.weight"] = _Target(module.weight, 1)
    packed = {id(one) for target in found.values() for one in target.held.parameters()}
    saved = model.state_dict().keys()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if name in saved and id(tensor) not in packed and not _is_adapter(name):
            found[_checkpoint_name(name)] = _Target(tensor, 1)
    return found


def _checkpoint_name(name: str) -> str:
    """Returns a tensor's name without the parts that an adapter adds."""
    return name.replace(".base_layer", "").replace(".original_module", "")


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def _fill(
    targets: dict[str, _Target],
    checkpoint: PackedCheckpoint,
    stored: StoredWeight,
    report: PackReport,
) -> None:
    """Copies one stored tensor into the model, if the model has a place for it."""
    name, expert, half = stored.name, None, None
    match = EXPERT.fullmatch(name)
    if match and name not in targets:
        half = _HALVES.get(match[3])
        name = f"{match[1]}.{'down_proj' if half is None else 'gate_up_proj'}"
        expert = int(match[2])
    if name not in targets:
        return  # For example the head of a tied model.
    target = targets[name]
    target.filled += 1
    if isinstance(target.held, Tensor):
        dense = _dense(checkpoint, stored)
        if dense.shape != target.held.shape:
            raise InputError(
                f"{stored.name} is {list(dense.shape)}, the model's is {list(target.held.shape)}"
            )
        target.held.copy_(dense)
        return
    weight = target.held
    if expert is None and len(weight.shape) == 3:
        target.filled += target.pieces - 1
        _fill_stack(target, checkpoint, stored, report)
        return
    if expert is not None and expert >= weight.shape[0]:
        raise InputError(f"{stored.name}: the model has {weight.shape[0]} experts")
    rows = weight.shape[-2]
    place = slice(0, rows) if half is None else slice(half * rows // 2, (half + 1) * rows // 2)
    parts = _parts(checkpoint, stored, weight, report, name)
    weight.set_rows(expert, place, parts)


def _fill_stack(
    target: _Target, checkpoint: PackedCheckpoint, stored: StoredWeight, report: PackReport
) -> None:
    """Copies a stack that is stored whole, expert by expert if it has to be packed."""
    weight = target.held
    if stored.parts and checkpoint.form is weight.form:
        weight.set(checkpoint.read_packed(stored))
        report.native += 1
        return
    dense = _dense(checkpoint, stored)
    if target.transposed and not stored.parts:
        dense = dense.transpose(-1, -2)
    if tuple(dense.shape) != weight.shape:
        raise InputError(f"{stored.name} is {list(dense.shape)}, not {list(weight.shape)}")
    for index in range(len(dense)):
        with naming(stored.name):
            parts = weight.form.quantize(dense[index])
        report.add(stored.name, weight.form, dense[index], parts)
        weight.set_matrix(index, parts)


def _parts(
    checkpoint: PackedCheckpoint,
    stored: StoredWeight,
    weight: PackedWeight,
    report: PackReport,
    layer: str,
) -> Parts:
    if stored.parts and checkpoint.form is weight.form:
        report.native += 1
        return checkpoint.read_packed(stored)
    dense = _dense(checkpoint, stored)
    with naming(stored.name):
        parts = weight.form.quantize(dense)
    report.add(layer, weight.form, dense, parts)
    return parts


def _dense(checkpoint: PackedCheckpoint, stored: StoredWeight) -> Tensor:
    if not stored.parts:
        return checkpoint.read(stored)
    assert checkpoint.form is not None
    return dequantize(checkpoint.form, checkpoint.read_packed(stored))
