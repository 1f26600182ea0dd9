"""Publishes the base with the adapter merged, for fleets that cannot serve adapters: ``merged``.

The trainer trains the adapter and computes unmerged. Readers see a plain model whose adapted layers
change a little in each version; nothing else is published after version 0::

    trainer   W + scale · B · A           unmerged, masters in float32
    run       round(W + scale · B · A)    under the base's names, packed weights in their format

A merge rounds, so sampler and trainer differ by more than arithmetic. Each version measures the
share of the adapter's change that its weights contain (`deltawire.export.merge`).

Version 0 is the base, which a trainer reads back from it. So the adapter starts without effect, and
version 0 stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, copy_saved_modules
from deltawire.export.cast import CastWeights, cast, restore_part
from deltawire.export.merge import (
    Change,
    MergeReport,
    Sums,
    changes_of,
    merged_parts,
    merged_weight,
    report_of,
)
from deltawire.export.source import WeightSource
from deltawire.placement.live import module_tensors
from deltawire.quantization.linear import PackedWeight
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec


def merged(model: Any) -> WeightSource:
    """Publishes the base in bf16 with the adapter merged; a model without an adapter as it is."""
    return MergedWeights(model) if changes_of(model) else CastWeights(model, "BF16")


class MergedWeights:
    """A `deltawire.export.source.WeightSource` that publishes an adapter's model as a plain one.

    ``report`` is what the last call of `tensors` or `trained` kept of the adapter's change, None
    before. The adapter's values at the time of this call are those that `restore` returns to.

    Example::

        source = open_source("merged", adapted(model, config, seed=0))
        publisher.publish(source.trained(), partial=True)
        source.report.total.kept
    """

    base_version = 0
    """The only version that `restore` takes: later ones do not hold the base."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._plain = CastWeights(model, "BF16")
        self.compute_dtype = self._plain.compute_dtype
        self.report: MergeReport | None = None
        self._changes = changes_of(model)
        self._packed = {
            name.replace(".base_layer.", "."): module
            for name, module in model.named_modules()
            if isinstance(module, PackedWeight)
        }
        self._specs = [one for one in self._plain.specs() if not one.name.startswith(PREFIX)]
        self._start = {
            name: tensor.detach().clone()
            for name, tensor in module_tensors(model).items()
            if name.startswith(PREFIX)
        }

    def specs(self) -> list[TensorSpec]:
        """See `WeightSource.specs`."""
        return self._specs

    def tensors(self) -> dict[str, Tensor]:
        """See `WeightSource.tensors`."""
        held = module_tensors(self._model)
        merged_now = self._merge(held)
        return {
            spec.name: merged_now[spec.name]
            if spec.name in merged_now
            else cast(held[spec.name], spec.dtype)
            for spec in self._specs
        }

    def trained(self) -> dict[str, Tensor]:
        """See `WeightSource.trained`: the weights with an adapter, and buffers."""
        buffers = {
            name: one for name, one in self._plain.trained().items() if name not in self._start
        }
        return self._merge(module_tensors(self._model)) | buffers

    @torch.no_grad()
    def restore(self, mirror: Mirror) -> None:
        """See `WeightSource.restore`: sets the base, and the adapter to its start.

        Raises `InputError` for another version than 0.
        """
        if mirror.version != self.base_version:
            raise InputError(
                f"version {mirror.version} holds merged weights; the base is version 0",
                hint='train with train.exporter = "bf16" to continue from any version',
                version=mirror.version,
            )
        held = module_tensors(self._model)
        for spec in self._specs:
            restore_part(held[spec.name], spec, mirror)
        for name, start in self._start.items():
            held[name].copy_(start)
        copy_saved_modules(self._model)

    @torch.no_grad()
    def _merge(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights that have an adapter, merged, by published name."""
        found: dict[str, Tensor] = {}
        sums: dict[str, Sums] = {}
        for name, change in self._changes.items():
            factors = {one: cast(held[one], "BF16") for one in change.factors}
            count = sums.setdefault(name, Sums())
            if name in self._packed:
                found |= _repacked(name, change, self._packed[name], factors, count)
            else:
                base = cast(held[name], "BF16")
                found[name] = merged_weight(change, base, factors, count)
        self.report = report_of(sums)
        return found


def _repacked(
    name: str, change: Change, weight: PackedWeight, factors: dict[str, Tensor], sums: Sums
) -> dict[str, Tensor]:
    """Returns the parts of a packed weight with the adapter's change, by published name."""
    fresh = PackedWeight(weight.form.name, weight.shape)
    for index, parts in merged_parts(change, weight, factors, sums):
        if index is None:
            fresh.set(parts)
        else:
            fresh.set_matrix(index, parts)
    return {f"{name}.{part}": one.detach() for part, one in fresh.named_parameters()}
