"""Finds the matrices of a model that are published quantized, under their names in checkpoints.

Linear layers are matrices by themselves. Experts are fused in the model, and one matrix each in
checkpoints. Embeddings, heads and routers are not quantized.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltawire.errors import InputError
from deltawire.placement.checkpoint_tensors import checkpoint_tensors
from deltawire.quantization.experts import STACKS, find_experts, stack_of
from deltawire.quantization.formats import PackedFormat

ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate", "score"})
"""The last parts of the names of linear layers that engines do not quantize."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix that is quantized by itself: rows of a held tensor, or of one expert of a stack.

    Example::

        for one in find_matrices(model, open_format("fp8-block")):
            print(one.name, one.shape)
    """

    name: str
    source: str
    index: int | None
    rows: slice
    shape: tuple[int, int]

    def of(self, held: Tensor, first: int = 0) -> Tensor:
        """Returns the matrix as a view of the held tensor, of whose stack ``first`` is the first
        expert."""
        return held[self.rows] if self.index is None else held[self.index - first, self.rows]


def find_matrices(model: nn.Module, form: PackedFormat) -> Iterator[QuantizedMatrix]:
    """Yields the matrices that are quantized; raises `InputError` if one does not fit, or there is
    none."""
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


def _linear_matrices(model: Any) -> Iterator[QuantizedMatrix]:
    embeddings = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is head or id(module.weight) in embeddings:
            continue
        if name.rpartition(".")[2] not in ROUTERS:
            rows, columns = module.weight.shape
            source = f"{name}.weight"
            yield QuantizedMatrix(source, source, None, slice(0, rows), (rows, columns))


def _expert_matrices(model: nn.Module, form: PackedFormat) -> Iterator[QuantizedMatrix]:
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
) -> QuantizedMatrix:
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
    return QuantizedMatrix(
        name, source, first // rows, slice(start, start + height), (height, columns)
    )


def unquantized_layers(model: nn.Module, matrices: Container[str]) -> list[str]:
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
