"""Publishes a model directory as version 0 of a new run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltawire import codec
from deltawire.config import RunConfig
from deltawire.config.features import stored_settings
from deltawire.config.machine import machine_policy
from deltawire.export.adapter import load_adapted
from deltawire.export.lines import line_model
from deltawire.export.models import holds_only_bf16, published_files, with_quantization
from deltawire.export.peft_directory import adapter_files, load_peft
from deltawire.export.source import WeightSource, open_source
from deltawire.quantization.packing import report_of
from deltawire.runtime.needs import needs_of
from deltawire.store import Bucket
from deltawire.sync import open_publisher
from deltawire.sync.chain.base_statement import BaseStatement, state_base
from deltawire.sync.chain.objects import put_blob
from deltawire.sync.publish.offload import require_room
from deltawire.wire.run import ModelFile, TensorSpec
from deltawire.wire.seal import Signer


def load_start(
    config: RunConfig, directory: Path, *, to_publish: bool = False
) -> tuple[Any, WeightSource]:
    """Loads the model that a configuration starts from, with its adapter, and its exporter.

    If it is only ``to_publish``, a model of bf16 weights is not widened to float32: that would take
    twice the memory, for the same published bits.
    """
    adapter = config.train.base_adapter
    narrow = (
        to_publish
        and config.train.exporter == "bf16"
        and not config.train.also_publish
        and adapter.packed == "none"
        and not adapter.modules_to_save
        and not adapter.init
        and holds_only_bf16(directory)
    )
    dtype = torch.bfloat16 if narrow else torch.float32
    model = load_adapted(directory, adapter, seed=config.seed, dtype=dtype)
    if adapter.init:
        load_peft(model, adapter, Path(adapter.init))
    return model, open_source(config.train.exporter, model)


def load_line(base: Any, config: RunConfig) -> tuple[Any, WeightSource]:
    """Loads the model that a line starts from over ``base``, which it shares, and its exporter."""
    adapter = config.train.adapter
    model = line_model(base, adapter, seed=config.seed)
    if adapter.init:
        load_peft(model, adapter, Path(adapter.init))
    return model, open_source(config.train.exporter, model)


def publish_start(
    bucket: Bucket,
    config: RunConfig,
    directory: Path,
    start: tuple[Any, WeightSource],
    *,
    signer: Signer | None = None,
    run_id: str = "",
) -> None:
    """Creates the run and commits version 0: ``start`` is what `load_start` returned.

    With ``signer``, the run is signed by its key; ``run_id`` is the new run's id, random by
    default.
    """
    model, source = start
    specs, tensors = source.specs(), source.tensors()
    snapshot_dir = machine_policy().publisher_dir(config.train.publisher_offload)
    if snapshot_dir is not None:  # Before anything is stored.
        require_room(snapshot_dir, specs)
    frozen = tensors.keys() - source.trained().keys()
    contents = published_files(directory, specs)
    quantization = getattr(source, "quantization_config", None)
    if quantization is not None:
        contents["config.json"] = with_quantization(contents["config.json"], quantization)
    if config.train.adapter.kind != "none":
        contents |= adapter_files(model, config.train.adapter, specs, base=config.model.path)
    if frozen:
        base = _stated_base(model, config, specs, {name: tensors[name] for name in frozen})
        contents[base.file_name] = base.encode()
    files = [
        ModelFile(name=name, blob=ref.hash, bytes=ref.bytes)
        for name, data in contents.items()
        for ref in [put_blob(bucket, data)]
    ]
    open_publisher(
        bucket,
        tensors,
        specs=specs,
        name=config.name,
        config=stored_settings(config),
        needs=needs_of(config),
        model_files=files,
        signer=signer,
        run_id=run_id,
        compaction_strides=(),
        frozen=frozen,
        snapshot_dir=snapshot_dir,
    ).close()


def _stated_base(
    model: Any, config: RunConfig, specs: Sequence[TensorSpec], frozen: Mapping[str, Tensor]
) -> BaseStatement:
    """States the frozen tensors, and what packing them changed."""
    digests = {}
    for spec in specs:
        if spec.name in frozen:
            bits = codec.bits_of(frozen[spec.name], spec.dtype).reshape(-1)
            digests[spec.name] = codec.digest_bits(spec.name, bits)
    report = report_of(model)
    packed = config.train.base_adapter.packed
    return state_base(specs, digests, packed=packed, native=report.native, errors=report.errors)
