"""Writes a version of an adapter run as a plain checkpoint: base and adapter merged, in shards.

One shard of the base is in memory at a time, with the adapter, which is small. Packed weights are
dequantized to bf16, so that transformers loads the directory as any other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from deltawire.codec import ITEMSIZE, Bits
from deltawire.config import AdapterConfig, RunConfig
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, open_model
from deltawire.export.merge import (
    Change,
    MergeReport,
    Sums,
    changes_of,
    merged_weight,
    report_of,
    require_kept,
)
from deltawire.export.models import fetch_model_files
from deltawire.placement.layout import TORCH_DTYPES
from deltawire.quantization.experts import find_experts
from deltawire.quantization.linear import PackedWeight
from deltawire.runtime.lines import run_of_line
from deltawire.store import Bucket
from deltawire.sync import load_mirror, read_run
from deltawire.wire.run import Run, TensorSpec

SHARD_BYTES = 2 << 30


def adapter_structure(bucket: Bucket, run: Run, adapter: AdapterConfig) -> Any:
    """Returns a run's model with its adapter, without values: on the meta device."""
    with fetch_model_files(bucket, run) as folder, torch.device("meta"):
        return open_model(Path(folder), adapter)


def adapter_of(run: Run, config: RunConfig, *, url: str) -> AdapterConfig:
    """Returns the adapter that a run trains; raises `InputError` for a run without one."""
    if config.train.adapter.kind == "none":
        raise InputError(
            "the run has no adapter: it trains the whole model",
            hint="use deltawire pull",
            run=url,
        )
    if not any(spec.name.startswith(PREFIX) for spec in run.tensors):
        raise InputError(
            "the run publishes merged weights, and its adapter is not in its versions",
            hint="use deltawire pull, which writes the merged model",
            run=url,
        )
    return config.train.adapter


def load_tensors(
    bucket: Bucket, run: Run, names: Mapping[str, TensorSpec], at: int
) -> dict[str, Tensor]:
    """Loads tensors of a version by name, and only those; raises as `load_mirror` does."""
    mirror = load_mirror(bucket, run, at=at, wanted=list(names))
    return {name: tensor_of(mirror.tensors[name], spec) for name, spec in names.items()}


def tensor_of(bits: Bits, spec: TensorSpec) -> Tensor:
    """Returns published bits as a tensor of their dtype and shape, which shares their memory."""
    flat = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1))
    return flat.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def write_merged(
    bucket: Bucket,
    run: Run,
    config: RunConfig,
    version: int,
    out: Path,
    *,
    floor: float = 0.0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> MergeReport:
    """Writes a version to ``out``, a new directory, with its adapter merged.

    ``progress`` is called with the bytes written and of all. Raises `InputError` for a run without
    an adapter, if ``out`` exists, and if the merge keeps less of the change than ``floor``.
    """
    adapter = adapter_of(run, config, url=bucket.url)
    if out.exists():
        raise InputError(f"{out} exists already", hint="name a new folder")
    model = adapter_structure(bucket, run, adapter)
    specs = {spec.name: spec for spec in run.tensors}
    factors = load_tensors(
        bucket, run, {name: one for name, one in specs.items() if name.startswith(PREFIX)}, version
    )
    base = _base_of(bucket, run, config, version)
    specs = {spec.name: spec for spec in base.run.tensors}
    changes, packed = changes_of(model), _packed_weights(model)
    sums: dict[str, Sums] = {}
    work = out.with_name(f".{out.name}.merging")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        shards = list(_shards(specs, packed))
        total, done = sum(size for _, size in shards), 0
        index: dict[str, str] = {}
        for number, (names, size) in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            wanted = {one: specs[one] for one in names}
            held = load_tensors(base.bucket, base.run, wanted, base.version)
            tensors = dict(_merged(held, packed, changes, factors, sums))
            index |= dict.fromkeys(tensors, file)
            safetensors.torch.save_file(tensors, work / file, {"format": "pt"})
            done += size
            progress(done, total)
        report = report_of(sums)
        require_kept(report, floor, what="the merge")
        listing = {"metadata": {"total_size": total}, "weight_map": index}
        (work / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2) + "\n")
        _write_settings(bucket, run, work, packed=bool(packed))
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report


class _Base(NamedTuple):
    """Where the base of an adapter is read: the adapter's own version, or the run above a line."""

    bucket: Bucket
    run: Run
    version: int


def _base_of(bucket: Bucket, run: Run, config: RunConfig, version: int) -> _Base:
    """Finds the base of an adapter; raises `InputError` if a line's run has another one."""
    if config.line is None:
        return _Base(bucket, run, version)
    above = run_of_line(bucket, config.line.name)
    found = read_run(above)
    if found.digest != config.line.base:
        raise InputError(
            f"the adapter is of another base: its line names {config.line.base[:16]}, the run's "
            f"base is {found.digest[:16]}",
            run=above.url,
        )
    return _Base(above, found, 0)


def _packed_weights(model: Any) -> dict[str, tuple[PackedWeight, bool]]:
    """Returns the packed weights by their names in a checkpoint, and whether it transposes them."""
    flipped = {name for name, module in find_experts(model).items() if module.is_transposed}
    return {
        name.replace(".base_layer.", "."): (module, name.rpartition(".")[0] in flipped)
        for name, module in model.named_modules()
        if isinstance(module, PackedWeight)
    }


def _shards(
    specs: Mapping[str, TensorSpec], packed: Mapping[str, Any]
) -> Iterator[tuple[list[str], int]]:
    """Names of the base's tensors in the run, a shard at a time, and the shard's bytes."""
    names: list[str] = []
    size = 0
    owners: dict[str, list[str]] = {}
    for name in specs:
        if not name.startswith(PREFIX):
            parent = name.rpartition(".")[0]
            owners.setdefault(parent if parent in packed else name, []).append(name)
    for owner, parts in owners.items():
        if owner in packed:
            weight = int(np.prod(packed[owner][0].shape)) * 2
        else:
            weight = specs[owner].count * ITEMSIZE[specs[owner].dtype]
        if names and size + weight > SHARD_BYTES:
            yield names, size
            names, size = [], 0
        names, size = [*names, *parts], size + weight
    yield names, size


def _merged(
    held: dict[str, Tensor],
    packed: Mapping[str, tuple[PackedWeight, bool]],
    changes: Mapping[str, Change],
    factors: Mapping[str, Tensor],
    sums: dict[str, Sums],
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a shard as a plain checkpoint has them, each removed from ``held``."""
    for stored in list(held):
        if stored not in held:
            continue
        name, parent = stored, stored.rpartition(".")[0]
        if parent in packed:
            like, flipped = packed[parent]
            weight = PackedWeight(like.form.name, like.shape)
            for part, parameter in weight.named_parameters():
                parameter.copy_(held.pop(f"{parent}.{part}"))
            name, base = parent, _dequantized(weight)
        else:
            flipped, base = False, held.pop(name)
        if name in changes:
            count = sums.setdefault(name, Sums())
            base = merged_weight(changes[name], base, factors, count)
        yield name, (base.transpose(-1, -2) if flipped else base).contiguous()


def _dequantized(weight: PackedWeight) -> Tensor:
    """Returns the whole weight in bf16, one matrix at a time."""
    if len(weight.shape) < 3:
        return weight.dequantized()
    return torch.stack([weight.dequantized(index) for index in range(weight.shape[0])])


def _write_settings(bucket: Bucket, run: Run, folder: Path, *, packed: bool) -> None:
    """Writes the model's other files; weights that were packed are bf16 now."""
    with fetch_model_files(bucket, run) as source:
        for file in sorted(Path(source).iterdir()):
            shutil.copyfile(file, folder / file.name)
    if packed:
        file = folder / "config.json"
        settings = json.loads(file.read_bytes())
        settings.pop("quantization_config", None)
        file.write_text(json.dumps(settings | {"dtype": "bfloat16"}, indent=2) + "\n")
