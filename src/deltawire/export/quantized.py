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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltawire.errors import InputError
from deltawire.export.cast import CastWeights, cast, restore_part
from deltawire.placement.checkpoint_tensors import checkpoint_tensors
from deltawire.placement.layout import TORCH_DTYPES, WIRE_DTYPES
from deltawire.placement.live import module_tensors, publish_views
from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.experts import STACKS, find_experts, stack_of
from deltawire.quantization.formats import PackedFormat, open_format
from deltawire.quantization.linear import PackedWeight
from deltawire.quantization.packing import pack_layers
from deltawire.quantization.sticky import quantize_sticky
from deltawire.quantization.stored import (
    StoredLayout,
    parts_of,
    quantization_config,
    stored_tensors,
)
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec

ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate", "score"})
"""The last parts of the names of linear layers that engines do not quantize."""


@dataclass(frozen=True)
class Scheme:
    """A format of codes, the layout of its tensors in checkpoints, and how fp8 scales are chosen.

    Example::

        SCHEMES["fp8-block"].form.block  # (128, 128)
    """

    form_name: str
    layout: StoredLayout = "compressed-tensors"
    power_of_two: bool = False

    @property
    def form(self) -> PackedFormat:
        """The packed format."""
        return open_format(self.form_name)


SCHEMES: Final = {
    "fp8-block": Scheme("fp8-block", "deepseek", power_of_two=True),
    "fp8-block-f32": Scheme("fp8-block", "deepseek"),
    "fp8-block-ct": Scheme("fp8-block", power_of_two=True),
    "fp8-block-f32-ct": Scheme("fp8-block"),
    "int4-g32": Scheme("int4-g32"),
    "mxfp4": Scheme("mxfp4"),
}
"""Schemes by the exporter's name. ``f32``: the scales of fp8 blocks are any float32, else powers of
two. ``ct``: fp8 blocks are stored as compressed-tensors does, else as DeepSeek does."""


@dataclass(frozen=True)
class _Matrix:
    """A matrix that is quantized by itself: rows of a held tensor, or of one expert of a stack."""

    name: str
    source: str
    index: int | None
    rows: slice
    shape: tuple[int, int]

    def of(self, held: Tensor) -> Tensor:
        """Returns the matrix as a view of the held tensor."""
        return held[self.rows] if self.index is None else held[self.index, self.rows]


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
        self._model, self._scheme, self._form = model, scheme, scheme.form
        self._unquantized = CastWeights(model, "BF16")
        self._matrices = {one.name: one for one in _matrices(model, scheme)}
        self._sources = {one.source for one in self._matrices.values()}
        self._scales: dict[str, Tensor] = {}
        specs = [one for one in self._unquantized.specs() if one.name not in self._sources]
        for one in self._matrices.values():
            specs += [
                TensorSpec(name, tuple(tensor.shape), WIRE_DTYPES[tensor.dtype])
                for name, tensor in self._empty(one).items()
            ]
        self._specs = sorted(specs, key=lambda spec: spec.name)
        self.quantization_config = quantization_config(
            self._form, scheme.layout, _unquantized_layers(model, self._matrices)
        )

    def specs(self) -> list[TensorSpec]:
        """See `WeightSource.specs`."""
        return self._specs

    def tensors(self) -> dict[str, Tensor]:
        """See `WeightSource.tensors`. Keeps the scales for the next call."""
        held = module_tensors(self._model)
        found = {
            spec.name: cast(held[spec.name], spec.dtype)
            for spec in self._unquantized.specs()
            if spec.name not in self._sources
        }
        for one in self._matrices.values():
            parts = self._quantized(one, held[one.source])
            found |= stored_tensors(self._form, self._scheme.layout, one.name, parts)
        return found

    def trained(self) -> dict[str, Tensor]:
        """See `WeightSource.trained`: all."""
        return self.tensors()

    @torch.no_grad()
    def restore(self, mirror: Mirror) -> None:
        """See `WeightSource.restore`: sets the model to the dequantized values, and keeps the
        scales.

        Raises `InputError` for another model's version, and `CorruptError` for codes or scales that
        are not finite.
        """
        held = module_tensors(self._model)
        if strange := mirror.tensors.keys() ^ {spec.name for spec in self._specs}:
            raise InputError(f"model and run name different tensors: {sorted(strange)[:5]}")
        for spec in self._unquantized.specs():
            if spec.name not in self._sources:
                restore_part(held[spec.name], spec, mirror)
        for one in self._matrices.values():
            parts = parts_of(self._form, self._scheme.layout, one.name, self._read(one, mirror))
            self._form.check(parts, one.shape)
            self._scales[one.name] = parts["scales"].clone()
            one.of(held[one.source]).copy_(dequantize(self._form, parts))

    @torch.no_grad()
    def write_served(self, model: nn.Module) -> None:
        """Sets a copy of the model to the dequantized values of what would be published now: those
        that samplers compute with."""
        held, copies = module_tensors(self._model), module_tensors(model)
        for one in self._matrices.values():
            parts = self._quantized(one, held[one.source])
            one.of(copies[one.source]).copy_(dequantize(self._form, parts))

    def continued(self) -> list[str]:
        """See `WeightSource.continued`: the names of scales."""
        names = []
        for one in self._matrices.values():
            empty = self._empty(one)
            scales = parts_of(self._form, self._scheme.layout, one.name, empty)["scales"]
            names += [name for name, tensor in empty.items() if tensor is scales]
        return names

    def continue_from(self, mirror: Mirror) -> None:
        """See `WeightSource.continue_from`: keeps a version's scales."""
        for one in self._matrices.values():
            empty = self._empty(one)
            stored = {
                name: self._read_tensor(name, tensor, mirror)
                for name, tensor in empty.items()
                if name in mirror.tensors
            }
            parts = parts_of(self._form, self._scheme.layout, one.name, empty | stored)
            self._scales[one.name] = parts["scales"].clone()

    @torch.no_grad()
    def _quantized(self, one: _Matrix, held: Tensor) -> dict[str, Tensor]:
        try:
            parts = quantize_sticky(
                self._form,
                cast(one.of(held), "BF16"),
                self._scales.get(one.name),
                power_of_two=self._scheme.power_of_two,
            )
        except InputError as error:
            raise InputError(f"{one.name}: {error.message}", hint=error.hint) from error
        self._scales[one.name] = parts["scales"]
        return parts

    def _empty(self, one: _Matrix) -> dict[str, Tensor]:
        """Returns the tensors of a matrix without memory, except for its shape."""
        parts = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in self._form.layout(one.shape).items()
        }
        return stored_tensors(self._form, self._scheme.layout, one.name, parts)

    def _read(self, one: _Matrix, mirror: Mirror) -> dict[str, Tensor]:
        return {
            name: self._read_tensor(name, tensor, mirror)
            for name, tensor in self._empty(one).items()
        }

    @staticmethod
    def _read_tensor(name: str, like: Tensor, mirror: Mirror) -> Tensor:
        bits = mirror.find(name, 0, like.numel())
        if bits is None or bits.itemsize != like.element_size():
            raise InputError(f"the mirror lacks all of {name}", version=mirror.version)
        dtype = TORCH_DTYPES[WIRE_DTYPES[like.dtype]]
        return torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).view(dtype).view(like.shape)


fp8_block = partial(QuantizedWeights, scheme=SCHEMES["fp8-block"])
fp8_block_f32 = partial(QuantizedWeights, scheme=SCHEMES["fp8-block-f32"])
fp8_block_ct = partial(QuantizedWeights, scheme=SCHEMES["fp8-block-ct"])
fp8_block_f32_ct = partial(QuantizedWeights, scheme=SCHEMES["fp8-block-f32-ct"])
int4_g32 = partial(QuantizedWeights, scheme=SCHEMES["int4-g32"])
mxfp4 = partial(QuantizedWeights, scheme=SCHEMES["mxfp4"])


def serve_quantized(model: nn.Module, exporter_name: str) -> nn.Module:
    """Replaces the quantized layers of ``model`` by packed ones without values, in place, and
    publishes their codes and scales: the module then holds what the exporter publishes.

    A packed layer computes with bf16(code · scale), dequantized in each pass. Returns the model as
    it is for an exporter that does not quantize.
    """
    scheme = SCHEMES.get(exporter_name)
    if scheme is None:
        return model
    matrices = list(_matrices(model, scheme))
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
            high = scheme.form.block[0]
            parts = {
                name: part[one.rows.start // (step := high if name == "scales" else 1) :][
                    : -(-one.shape[0] // step)
                ]
                for name, part in weight.parts(one.index).items()
            }
            found |= stored_tensors(scheme.form, scheme.layout, one.name, parts)
        return found

    publish_views(model, packed, views)
    return model


def _matrices(model: nn.Module, scheme: Scheme) -> Iterator[_Matrix]:
    """Yields the matrices that are quantized; raises `InputError` if one does not fit, or there is
    none."""
    form = scheme.form
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise InputError(
            f"an adapter cannot be published as {form.name}",
            hint='set train.exporter = "merged" and serve a packed base, or "bf16"',
        )
    found = [*_linear_matrices(model), *_expert_matrices(model, form)]
    for one in found:
        try:
            form.layout(one.shape)
        except InputError as error:
            raise InputError(
                f"{one.name} cannot be published as {form.name}: {error.message}",
                hint='set train.exporter = "bf16" or "fp8-block", which hold any shape',
            ) from error
    if not found:
        raise InputError(
            f"the model has no linear layers or experts to publish as {form.name}",
            hint='set train.exporter = "bf16"',
        )
    yield from found


def _linear_matrices(model: Any) -> Iterator[_Matrix]:
    embeddings = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is head or id(module.weight) in embeddings:
            continue
        if name.rpartition(".")[2] not in ROUTERS:
            rows, columns = module.weight.shape
            source = f"{name}.weight"
            yield _Matrix(source, source, None, slice(0, rows), (rows, columns))


def _expert_matrices(model: nn.Module, form: PackedFormat) -> Iterator[_Matrix]:
    """Yields the matrices of fused experts under their names in checkpoints, which the library's
    own conversion gives for the numbers of their rows."""
    for name, module in find_experts(model).items():
        for stack in STACKS:
            held = stack_of(module, stack)
            if not isinstance(held, nn.Parameter):
                continue
            source = f"{name}.{stack}"
            if module.is_transposed:
                raise InputError(
                    f"{source} is stored with inputs as rows, which {form.name} checkpoints do not "
                    "hold",
                    hint='set train.exporter = "bf16"',
                )
            count, rows, columns = held.shape
            numbers = torch.arange(count * rows).view(count, rows, 1)
            for stored, which in checkpoint_tensors(model, {source: numbers}).items():
                yield _expert_matrix(stored, source, which, (rows, columns), form)


def _expert_matrix(
    name: str, source: str, which: Tensor, size: tuple[int, int], form: PackedFormat
) -> _Matrix:
    rows, columns = size
    first, height = int(which.flatten()[0]), which.numel()
    whole = torch.equal(which, torch.arange(first, first + height).view(height, 1))
    if which.ndim != 2 or not whole or not name.endswith(".weight"):
        raise InputError(
            f"{source} is stored as {name}, in no layout that {form.name} checkpoints have",
            hint='set train.exporter = "bf16"',
        )
    start = first % rows
    if start % form.block[0] or ((start + height) % form.block[0] and start + height != rows):
        raise InputError(
            f"{name} cannot be published as {form.name}: engines fuse it with others, and its "
            f"{height} rows are not whole blocks of {form.block[0]}",
            hint='set train.exporter = "bf16", or use a model whose expert size is a multiple',
        )
    return _Matrix(name, source, first // rows, slice(start, start + height), (height, columns))


def _unquantized_layers(model: nn.Module, matrices: Mapping[str, _Matrix]) -> list[str]:
    """Returns the names of layers with a matrix that is not quantized, such as heads and
    routers."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.ndim == 2
        and not isinstance(module, nn.Embedding)
        and f"{name}.weight" not in matrices
    ]
