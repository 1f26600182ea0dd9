"""Publishes linear layers and experts as a quantized fleet serves them: ``fp8-block`` and others.

The trainer trains and computes in full precision; what it publishes, and what digests and
attestations are of, are the codes and scales that engines load. Everything else (embeddings, heads,
norms, routers, biases) is published in bf16::

    trainer   masters in float32 ──▶ bf16 ──▶ codes and scales ──▶ bucket ──▶ engines
                                                scales of the version before

A version is a function of the trainer's weights and of the scales of the version before it
(`deltawire.quantization.sticky`), which a trainer that starts again reads from that version. So it
publishes the same bits.

A published version does not hold the trainer's weights: `QuantizedWeights.lossy`. A trainer
continues from a checkpoint, and version 0 has one too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltawire.config.exporters import Scheme, scheme_of
from deltawire.errors import InputError
from deltawire.export.cast import CastWeights, cast, restore_part
from deltawire.export.matrices import QuantizedMatrix, find_matrices, unquantized_layers
from deltawire.export.matrix_rows import (
    MatrixRows,
    SharedBlocks,
    published_matrix_rows,
    rows_of_mirror,
)
from deltawire.export.shards import LocalShard, box_of, local_part, published_rows, rows_of_rank
from deltawire.placement.layout import TORCH_DTYPES, WIRE_DTYPES
from deltawire.placement.live import module_tensors, publish_views
from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.formats import PackedFormat, open_format
from deltawire.quantization.linear import PackedWeight
from deltawire.quantization.packing import pack_layers
from deltawire.quantization.sticky import quantize_rows
from deltawire.quantization.stored import (
    quantization_config,
    stored_names,
    stored_tensors,
)
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec


class QuantizedWeights:
    """A `deltawire.export.source.WeightSource` of quantized layers, and bf16 for everything else.

    Raises `InputError` if a layer's shape has no place in the format, if the model has an adapter,
    or if nothing is left to quantize.

    Example::

        source = open_source("fp8-block", model)
        publisher.publish(source.tensors())
        source.quantization_config["weight_block_size"]  # [128, 128]
    """

    lossy = True
    """A published version does not hold the values that the trainer continues from."""

    def __init__(self, model: nn.Module, *, scheme: Scheme) -> None:
        self.compute_dtype = torch.bfloat16
        self._model, self._scheme, self._form = model, scheme, open_format(scheme.form_name)
        self._matrices = {one.name: one for one in find_matrices(model, self._form)}
        self._by_source: dict[str, list[QuantizedMatrix]] = {}
        for one in self._matrices.values():
            self._by_source.setdefault(one.source, []).append(one)
        held = module_tensors(model)
        self._shapes = {source: tuple(held[source].shape) for source in self._by_source}
        self._unquantized = CastWeights(model, "BF16", without=self._by_source)
        self._shared = SharedBlocks(self._form, list(self._matrices.values()))
        self._scales: dict[str, Tensor] = {}
        specs = list(self._unquantized.specs())
        for one in self._matrices.values():
            specs += [
                TensorSpec(name, tuple(tensor.shape), WIRE_DTYPES[tensor.dtype])
                for name, tensor in self._empty(one).items()
            ]
        self._specs = sorted(specs, key=lambda spec: spec.name)
        self.quantization_config = quantization_config(
            self._form, scheme.layout, unquantized_layers(model, self._matrices)
        )

    def specs(self) -> list[TensorSpec]:
        """See `WeightSource.specs`."""
        return self._specs

    def tensors(self) -> dict[str, Tensor]:
        """See `WeightSource.tensors`. Keeps the scales for the next call."""
        held = module_tensors(self._model)
        found = self._unquantized.tensors()
        for one in self._matrices.values():
            values = cast(one.of(local_part(held[one.source])), "BF16")
            parts = self._quantized(MatrixRows(one, 0, values))
            found |= stored_tensors(self._form, self._scheme.layout, one.name, parts)
        return found

    def trained(self) -> dict[str, Tensor]:
        """See `WeightSource.trained`: all."""
        return self.tensors()

    @torch.no_grad()
    def shards(self, rank: int, *, trained: bool = False) -> dict[str, LocalShard]:
        """See `WeightSource.shards`. Keeps the scales of the blocks that this rank's rows lie in
        for the next call."""
        found = self._unquantized.shards(rank, trained=trained)
        rows = list(published_matrix_rows(self._by_source, module_tensors(self._model), rank))
        peaks = self._shared.agree(rows)
        for one in rows:
            parts = self._quantized(one, peaks.get(one.matrix.name))
            found |= self._stored_rows(one, parts)
        return found

    @torch.no_grad()
    def derived(self, mirror: Mirror) -> dict[str, LocalShard]:
        """Returns what is published of the weights of a mirror of the same model in bf16: the
        ranges of which it holds the rows. All ranks call this together, with their ranges of one
        version. Keeps the scales for the next call.

        Does not read the model, so another thread may compute with it meanwhile: FSDP2 replaces the
        parameters of a module whose state is read.
        """
        found = {}
        for spec in self._unquantized.specs():
            bits = mirror.tensors.get(spec.name)
            if bits is not None:
                values = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
                dtype = TORCH_DTYPES[spec.dtype]
                found[spec.name] = LocalShard(values.view(dtype), mirror.starts.get(spec.name, 0))
        rows = list(rows_of_mirror(self._by_source, self._shapes, mirror))
        peaks = self._shared.agree(rows)
        for one in rows:
            parts = self._quantized(one, peaks.get(one.matrix.name))
            found |= self._stored_rows(one, parts)
        return found

    def exchange_over(self, group: Any) -> None:
        """Lets ranks exchange peaks over a process group for one thread of each rank."""
        self._shared = SharedBlocks(self._form, list(self._matrices.values()), group)

    def wanted(self) -> dict[str, tuple[int, int] | None]:
        """See `WeightSource.wanted`."""
        found = self._unquantized.wanted()
        held = module_tensors(self._model)
        for one in self._matrices.values():
            rows = _held_rows(one, held[one.source])
            if rows is not None:
                found |= dict.fromkeys(self._constants(one)) | self._wanted_parts(one, rows)
        return found

    @torch.no_grad()
    def restore(self, mirror: Mirror) -> None:
        """See `WeightSource.restore`: sets the model to the dequantized values, and keeps the
        scales.

        Raises `InputError` for another model's version, and `CorruptError` for codes or scales that
        are not finite.
        """
        held = module_tensors(self._model)
        if strange := mirror.tensors.keys() - {spec.name for spec in self._specs}:
            raise InputError(f"model and run name different tensors: {sorted(strange)[:5]}")
        for spec in self._unquantized.specs():
            restore_part(held[spec.name], spec, mirror)
        for one in self._matrices.values():
            rows = _held_rows(one, held[one.source])
            if rows is not None:
                parts = self._read(one, rows, mirror)
                size = (len(parts["codes"]), one.shape[1])
                self._form.check(parts, size)
                _write(one, held[one.source], rows, dequantize(self._form, parts), self._form)
        self.continue_from(mirror)

    @torch.no_grad()
    def write_served(self, model: nn.Module) -> None:
        """Sets a copy of the model to the dequantized values of what would be published now: those
        that samplers compute with."""
        held, copies = module_tensors(self._model), module_tensors(model)
        for one in self._matrices.values():
            values = cast(one.of(local_part(held[one.source])), "BF16")
            parts = self._quantized(MatrixRows(one, 0, values))
            one.of(copies[one.source]).copy_(dequantize(self._form, parts))

    def continued(self) -> dict[str, tuple[int, int] | None]:
        """See `WeightSource.continued`: the scales of the blocks that this rank's rows lie in."""
        found = {}
        for one, rows in self._own_rows():
            name = stored_names(self._form, self._scheme.layout, one.name)["scales"]
            found[name] = self._wanted_parts(one, rows)[name]
        return found

    def continue_from(self, mirror: Mirror) -> None:
        """See `WeightSource.continue_from`: keeps a version's scales."""
        for one, rows in self._own_rows():
            self._scales[one.name] = self._read_part(one, "scales", rows, mirror)

    def _own_rows(self) -> Iterator[tuple[QuantizedMatrix, tuple[int, int]]]:
        """Yields the rows (first, end) of each matrix that this rank publishes."""
        held = module_tensors(self._model)
        rank = dist.get_rank() if dist.is_initialized() else 0
        for one in self._matrices.values():
            rows = published_rows(held[one.source], rank)
            if rows is None:
                continue
            if one.index is None:
                yield one, rows
            elif rows[0] <= one.index < rows[1]:
                yield one, (0, one.shape[0])

    @torch.no_grad()
    def _quantized(self, rows: MatrixRows, peaks: Tensor | None = None) -> dict[str, Tensor]:
        one = rows.matrix
        try:
            parts = quantize_rows(
                self._form,
                rows.values,
                rows.first,
                self._scales.get(one.name),
                power_of_two=self._scheme.power_of_two,
                peaks=peaks,
            )
        except InputError as error:
            raise InputError(f"{one.name}: {error.message}", hint=error.hint) from error
        self._scales[one.name] = parts["scales"]
        return parts

    def _stored_rows(self, rows: MatrixRows, parts: dict[str, Tensor]) -> dict[str, LocalShard]:
        """Returns what this rank publishes of a matrix: the codes of its rows, and the scales of
        the blocks that begin with one of them."""
        one, high = rows.matrix, self._form.block[0]
        names = stored_names(self._form, self._scheme.layout, one.name)
        block = -(-rows.first // high)
        scales = parts["scales"][block - rows.first // high :]
        stored = stored_tensors(
            self._form, self._scheme.layout, one.name, parts | {"scales": scales}
        )
        codes = stored[names["codes"]]
        found = {names["codes"]: LocalShard(codes.reshape(-1), rows.first * codes.shape[1])}
        if len(scales):
            found[names["scales"]] = LocalShard(scales.reshape(-1), block * scales.shape[1])
        if not rows.first:
            found |= {name: LocalShard(one, 0) for name, one in self._constants(one).items()}
        return found

    def _constants(self, one: QuantizedMatrix) -> dict[str, Tensor]:
        """Returns the tensors of a matrix that state its shape."""
        names = stored_names(self._form, self._scheme.layout, one.name).values()
        empty = self._empty(one)
        return {name: tensor for name, tensor in empty.items() if name not in names}

    def _empty(self, one: QuantizedMatrix) -> dict[str, Tensor]:
        """Returns the tensors of a matrix without memory, except for its shape."""
        parts = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in self._form.layout(one.shape).items()
        }
        return stored_tensors(self._form, self._scheme.layout, one.name, parts)

    def _wanted_parts(
        self, one: QuantizedMatrix, rows: tuple[int, int]
    ) -> dict[str, tuple[int, int] | None]:
        """Returns the rows of each part, by its stored name, that whole blocks of ``rows`` have."""
        names = stored_names(self._form, self._scheme.layout, one.name)
        layout = self._form.layout(one.shape)
        found: dict[str, tuple[int, int] | None] = {}
        for part, name in names.items():
            first, end = self._part_rows(part, rows)
            found[name] = None if (first, end) == (0, layout[part][0][0]) else (first, end)
        return found

    def _part_rows(self, part: str, rows: tuple[int, int]) -> tuple[int, int]:
        high = self._form.block[0]
        block = rows[0] // high
        return (block, -(-rows[1] // high)) if part == "scales" else (block * high, rows[1])

    def _read(
        self, one: QuantizedMatrix, rows: tuple[int, int], mirror: Mirror
    ) -> dict[str, Tensor]:
        return {part: self._read_part(one, part, rows, mirror) for part in ("codes", "scales")}

    def _read_part(
        self, one: QuantizedMatrix, part: str, rows: tuple[int, int], mirror: Mirror
    ) -> Tensor:
        """Reads the codes or scales of ``rows``, from the first row of a block."""
        name = stored_names(self._form, self._scheme.layout, one.name)[part]
        like = self._empty(one)[name]
        first, end = self._part_rows(part, rows)
        bits = mirror.find(name, first * like.shape[1], (end - first) * like.shape[1])
        if bits is None or bits.itemsize != like.element_size():
            raise InputError(
                f"the mirror lacks rows {first} to {end} of {name}", version=mirror.version
            )
        tensor = torch.from_numpy(bits.view(f"i{bits.itemsize}").copy())
        dtype = torch.uint8 if part == "codes" else like.dtype
        return tensor.view(dtype).view(end - first, -1)


def _held_rows(one: QuantizedMatrix, held: Tensor) -> tuple[int, int] | None:
    """Returns the rows (first, end) of a matrix that this rank holds values of, None for none."""
    first, end = rows_of_rank(held) or (0, len(held))
    if one.index is None:
        return (first, end) if first < end else None
    return (0, one.shape[0]) if first <= one.index < end else None


def _write(
    one: QuantizedMatrix, held: Tensor, rows: tuple[int, int], values: Tensor, form: PackedFormat
) -> None:
    """Sets this rank's part of a matrix; ``values`` begin with the block that ``rows`` begin in."""
    local = local_part(held)
    if one.index is not None:
        one.of(local, (rows_of_rank(held) or (0, 0))[0]).copy_(values)
        return
    shape, offset = box_of(held) if isinstance(held, DTensor) else (one.shape, (0, 0))
    left = slice(offset[1], offset[1] + shape[1])
    local.copy_(values[rows[0] % form.block[0] :, left])


def serve_quantized(model: nn.Module, exporter_name: str) -> nn.Module:
    """Replaces the quantized layers of ``model`` by packed ones without values, in place, and
    publishes their codes and scales: the module then holds what the exporter publishes.

    A packed layer computes with bf16(code · scale), dequantized in each pass. Returns the model as
    it is for an exporter that does not quantize.
    """
    scheme = scheme_of(exporter_name)
    if scheme is None:
        return model
    form = open_format(scheme.form_name)
    matrices = list(find_matrices(model, form))
    linear = [one.source.removesuffix(".weight") for one in matrices if one.index is None]
    pack_layers(model, scheme.form_name, linear)
    packed = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, PackedWeight)
        for part in dict(module.named_parameters())
    }

    def views() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for one in matrices:
            weight: Any = model.get_submodule(one.source)
            high = form.block[0]
            parts = {
                name: part[one.rows.start // (step := high if name == "scales" else 1) :][
                    : -(-one.shape[0] // step)
                ]
                for name, part in weight.parts(one.index).items()
            }
            found |= stored_tensors(form, scheme.layout, one.name, parts)
        return found

    publish_views(model, packed, views)
    return model
