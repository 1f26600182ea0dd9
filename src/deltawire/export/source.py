"""Defines `WeightSource`, the tensors that a trainer publishes, and opens those of an exporter.

An exporter is one module in this folder and one line in `deltawire.config.exporters`. It decides
which tensors of a model are published, in which dtypes, and how a published version is read back
into the model::

    trainer ── step ──▶ model ── tensors() ──▶ publisher ──▶ bucket
                          ▲                                     │
                          └──────────── restore(mirror) ◀───────┘
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from deltawire import codec
from deltawire.codec import Bits, Digest
from deltawire.config.exporters import require_exporter
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec


class WeightSource(Protocol):
    """The published view of a model that is being trained.

    Example::

        source = open_source("bf16", model)
        publisher = open_publisher(bucket, source.tensors(), specs=source.specs())
        ...                                  # train
        publisher.publish(source.tensors())
    """

    compute_dtype: torch.dtype
    """The dtype to which the trainer rounds parameters after each step, so that it computes with
    the published values.
    """

    def specs(self) -> list[TensorSpec]:
        """Returns the tensor table, in name order; it never changes during a run."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the published values by name, as contiguous CPU tensors. They may share memory
        with the model: publish them before the next step."""
        ...

    def trained(self) -> Mapping[str, Tensor]:
        """Returns those of `tensors` that a training step may change: all, or an adapter's."""
        ...

    # To publish from several ranks, a source has two more methods.
    #
    # def shards(self, rank: int, *, trained: bool = False) -> Mapping[str, LocalShard]:
    #     Returns this rank's ranges of the published tensors, flat and on the CPU; the ranges of
    #     all ranks cover every tensor once. ``trained`` asks for those of `trained` only. All
    #     ranks call this together.
    #
    # def wanted(self) -> Mapping[str, tuple[int, int] | None]:
    #     Returns the rows of each tensor that `restore` reads on this rank; None for all rows.

    # A source of which later versions are not enough to restore the model has two attributes.
    #
    # base_version: int              The only version that `restore` takes.
    # report: MergeReport | None     What the last published values kept of an adapter's change.
    #
    # A source whose versions do not hold the values that the trainer continues from has:
    #
    # lossy: bool                    True: a trainer continues from checkpoints only.
    # quantization_config: dict      What config.json states of the published weights.
    # def continued(self) -> Mapping[str, tuple[int, int] | None]:
    #     Returns the rows of published tensors that this rank's part of the next version depends
    #     on; None for all rows.
    # def continue_from(self, mirror: Mirror) -> None:
    #     Takes these from a mirror of the last published version, which may hold nothing else.

    def restore(self, mirror: Mirror) -> None:
        """Sets the model to a published version. Raises `InputError` if the mirror's tensors are
        not those of `specs`, and `CorruptError` if the model then holds different bits.
        """
        ...


def open_source(exporter: str, model: Any) -> WeightSource:
    """Opens the exporter of that name on ``model``; raises `InputError` for an unknown name."""
    registered = require_exporter(exporter)
    module, _, name = registered.place.partition(":")
    settings = {} if registered.scheme is None else {"scheme": registered.scheme}
    source: WeightSource = getattr(importlib.import_module(module), name)(model, **settings)
    return source


def is_lossy(source: WeightSource) -> bool:
    """Returns whether a published version lacks values that a trainer needs to continue."""
    return bool(getattr(source, "lossy", False))


def wanted_of(source: WeightSource) -> Mapping[str, tuple[int, int] | None] | None:
    """Returns the rows of each tensor that this rank must load to restore; None for all."""
    wanted = getattr(source, "wanted", None)
    found: Mapping[str, tuple[int, int] | None] | None = wanted() if wanted else None
    return found


def bits_of(source: WeightSource) -> dict[str, Bits]:
    """Returns the published values as arrays of unsigned integers."""
    tensors = source.tensors()
    return {spec.name: codec.bits_of(tensors[spec.name], spec.dtype) for spec in source.specs()}


def digest_of(source: WeightSource) -> Digest:
    """Returns the digest that a version published now would have."""
    return codec.digest_model(bits_of(source))
