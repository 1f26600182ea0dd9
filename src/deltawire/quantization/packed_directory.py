"""Writes a model directory again with packed weights, in compressed-tensors' layout.

Tensors are read, packed and written one after the other, so memory is that of one shard. Tensors
that are in the format already keep their codes; the others are quantized, and the report has the
relative error of each layer.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from torch import Tensor

from deltawire.errors import InputError
from deltawire.packed_formats import PACKED
from deltawire.quantization.checkpoints import PackedCheckpoint, StoredWeight
from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.formats import PackedFormat, open_format
from deltawire.quantization.packing import EXPERT, PackReport
from deltawire.quantization.stored import stored_tensors

SHARD_BYTES = 1 << 30
_LAYOUT: Final = "compressed-tensors"
_INDEX = "model.safetensors.index.json"


@torch.no_grad()
def pack_directory(
    source: Path,
    out: Path,
    form_name: str,
    *,
    layers: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> PackReport:
    """Writes ``source`` to ``out``, a new directory, with its experts packed.

    ``layers`` are last parts of names of linear layers that are packed too, such as ``o_proj``.
    ``progress`` is called with the bytes that were written. Raises `InputError` if nothing is left
    to pack, for fused stacks, which the layout does not have, and if ``out`` exists.
    """
    form, report = open_format(form_name), PackReport()
    if out.exists():
        raise InputError(f"{out} exists already", hint="name a new folder")
    work = out.with_name(f".{out.name}.packing")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        with PackedCheckpoint(source) as checkpoint:
            shards = _Shards(work, progress)
            left: list[str] = []
            for stored in checkpoint.weights():
                layer = _layer_of(stored, layers)
                if layer:
                    shards.add(_packed(checkpoint, stored, form, report, layer))
                    continue
                dense = _dense(checkpoint, stored)
                if dense.ndim == 2 and stored.name.endswith(".weight"):
                    left.append(stored.name.removesuffix(".weight"))
                shards.add({stored.name: dense})
            if not report.native and not report.squares:
                raise InputError(
                    f"{source} has no experts to pack",
                    hint="name linear layers, such as --layers q_proj o_proj",
                )
            shards.finish()
        _write_rest(source, work, form, left)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report


class _Shards:
    """Gathers tensors, and writes a file whenever they exceed `SHARD_BYTES`."""

    def __init__(self, folder: Path, progress: Callable[[int], None]) -> None:
        self._folder = folder
        self._progress = progress
        self._held: dict[str, Tensor] = {}
        self._files: list[tuple[list[str], int]] = []
        self._bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._held |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes >= SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        if self._held:
            self._write()
        count = len(self._files)
        names: dict[str, str] = {}
        for number, (held, _) in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / str(number)).rename(self._folder / file)
            names |= dict.fromkeys(held, file)
        total = sum(size for _, size in self._files)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        file = self._folder / str(len(self._files))
        safetensors.torch.save_file(self._held, file, {"format": "pt"})
        self._files.append((list(self._held), self._bytes))
        self._progress(self._bytes)
        self._held, self._bytes = {}, 0


def _layer_of(stored: StoredWeight, layers: Sequence[str]) -> str:
    """Returns the layer that a tensor is packed as part of, empty if it stays as it is."""
    match = EXPERT.fullmatch(stored.name)
    if match:
        return f"{match[1]}.{match[3]}"
    if re.search(r"\.experts\.(gate_up_proj|up_proj|down_proj)$", stored.name):
        raise InputError(
            f"{stored.name[:200]} is a fused stack, which compressed-tensors' layout does not have",
            hint="train.adapter.packed packs it while a run loads it",
        )
    name = stored.name.removesuffix(".weight")
    last = name.rpartition(".")[2]
    return name if name != stored.name and last in layers else ""


def _packed(
    checkpoint: PackedCheckpoint,
    stored: StoredWeight,
    form: PackedFormat,
    report: PackReport,
    layer: str,
) -> dict[str, Tensor]:
    if stored.parts and checkpoint.form is form:
        report.native += 1
        return stored_tensors(form, _LAYOUT, stored.name, checkpoint.read_packed(stored))
    dense = _dense(checkpoint, stored)
    parts = form.quantize(dense)
    report.add(layer, form, dense, parts)
    return stored_tensors(form, _LAYOUT, stored.name, parts)


def _dense(checkpoint: PackedCheckpoint, stored: StoredWeight) -> Tensor:
    if not stored.parts:
        return checkpoint.read(stored)
    assert checkpoint.form is not None
    return dequantize(checkpoint.form, checkpoint.read_packed(stored))


def _write_rest(source: Path, out: Path, form: PackedFormat, left: Sequence[str]) -> None:
    """Copies the other files, and states the scheme in ``config.json``."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name != _INDEX:
            shutil.copyfile(file, out / file.name)
    config: dict[str, Any] = json.loads((source / "config.json").read_bytes())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": PACKED[form.name].layout,
        "quantization_status": "compressed",
        "ignore": sorted(left),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, "dynamic": False, **PACKED[form.name].weights},
            }
        },
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
