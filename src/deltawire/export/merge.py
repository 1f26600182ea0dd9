"""Adds an adapter to the weights of its base, and measures what rounding leaves of the change.

A merge rounds. Of a change that is small next to the weights, bf16 keeps a part, and a packed
format of 4 bits next to nothing: a weight moves only if the change takes it to another code. A
block keeps its scale unless a new one is nearer, so rounding never adds to the difference. Every
merge reports, for each layer, the share of the change that the merged weights contain::

    exact     W + scale · B · A          change = scale · B · A
    merged    round(W + change)          real   = merged − W
    kept      ⟨real, change⟩ / ⟨change, change⟩
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, wrapped_layers
from deltawire.quantization.dequantize import dequantize, requantize
from deltawire.quantization.experts import STACKS, find_experts, stack_of
from deltawire.quantization.formats import PackedFormat, Parts
from deltawire.quantization.linear import PackedLinear, PackedWeight


class LayerMerge(msgspec.Struct, frozen=True):
    """The effect of a merge on one weight, or on all in the mean.

    ``kept`` is the part of the adapter's change that the merged weight contains (its projection);
    ``error`` the norm of the difference to the exact sum, relative to the change; ``changed`` the
    share of its elements that differ from the base's; ``size`` the norm of the change, relative to
    the weight's.
    """

    name: str
    kept: float
    error: float
    changed: float
    size: float


class MergeReport(msgspec.Struct, frozen=True):
    """The part of an adapter's change that a merge kept: over all weights, and of each."""

    total: LayerMerge
    layers: list[LayerMerge]

    def worst(self, count: int) -> list[LayerMerge]:
        """Returns the weights of which least was kept."""
        return sorted(self.layers, key=lambda one: one.kept)[:count]


@dataclass
class Sums:
    """Sums over the elements of merged weights, from which `LayerMerge` follows."""

    elements: int = 0
    moved: int = 0
    along: float = 0.0
    change: float = 0.0
    lost: float = 0.0
    weight: float = 0.0

    def add(self, base: Tensor, change: Tensor, merged: Tensor) -> None:
        """Counts a weight, or a part of one: float32 tensors of one shape."""
        real = merged - base
        self.elements += base.numel()
        self.moved += int((real != 0).sum())
        for key, value in (
            ("along", real * change),
            ("change", change.square()),
            ("lost", (real - change).square()),
            ("weight", base.square()),
        ):
            setattr(self, key, getattr(self, key) + float(value.sum(dtype=torch.float64)))

    def plus(self, other: Sums) -> Sums:
        """Returns the sums over both."""
        return Sums(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def report(self, name: str) -> LayerMerge:
        """Returns the shares."""
        whole = self.change
        return LayerMerge(
            name,
            kept=self.along / whole if whole else 1.0,
            error=(self.lost / whole) ** 0.5 if whole else 0.0,
            changed=self.moved / max(self.elements, 1),
            size=(whole / self.weight) ** 0.5 if self.weight else 0.0,
        )


def report_of(sums: Mapping[str, Sums]) -> MergeReport:
    """Returns the report on weights by name."""
    total = Sums()
    for one in sums.values():
        total = total.plus(one)
    return MergeReport(
        total.report("all"), [one.report(name) for name, one in sorted(sums.items())]
    )


@dataclass(frozen=True)
class Change:
    """How one weight of the base changes: by a product of factors, or to a trained copy.

    ``weight`` is its name in a plain checkpoint, ``shape`` what it has there. ``factors`` are names
    in the run: A and B, or the copy. ``form`` is the format of a packed weight, whose parts the run
    holds under ``parts``.
    """

    weight: str
    shape: tuple[int, ...]
    factors: tuple[str, ...]
    scale: float = 1.0
    embedding: bool = False
    transposed: bool = False
    """The checkpoint holds [inputs, outputs] of each expert."""
    form: PackedFormat | None = None

    def matrices(self) -> int:
        """Returns the number of matrices: of experts, or 1."""
        return self.shape[0] if len(self.shape) == 3 else 1

    def of(self, index: int, factors: Mapping[str, Tensor]) -> Tensor:
        """Returns the change of one matrix, float32 [outputs, inputs]; ``factors`` by name."""
        first, second = (factors[name].float() for name in self.factors)
        if first.ndim == 3:
            first = first[index % len(first)]
            second = second[index % len(second)]
        product = (second @ first) * self.scale
        return product.T if self.embedding else product


def changes_of(model: Any) -> dict[str, Change]:
    """Returns what an adapter changes, by the weight's name in a plain checkpoint.

    ``model`` may be on the meta device; without an adapter nothing changes.
    """
    found = []
    for name in wrapped_layers(model):
        layer = model.get_submodule(name)
        base = layer.base_layer
        embedding = isinstance(base, nn.Embedding)
        parts = ("lora_embedding_A", "lora_embedding_B") if embedding else ()
        factors = parts or ("lora_A.weight", "lora_B.weight")
        packed = base.weight.form if isinstance(base, PackedLinear) else None
        found.append(
            Change(
                f"{name}.weight",
                tuple(base.weight.shape),
                tuple(f"{PREFIX}{name}.{part}" for part in factors),
                scale=layer.scaling[layer.active_adapters[0]],
                embedding=embedding,
                form=packed,
            )
        )
    for name, module in find_experts(model).items():
        adapters = getattr(module, "adapters", {})
        found += [
            _change_of_stack(f"{name}.{stack}", module, stack)
            for stack in STACKS
            if stack in adapters
        ]
    for name, module in model.named_modules():
        if hasattr(module, "original_module"):
            for part, tensor in module.original_module.named_parameters():
                copy = (f"{PREFIX}{name}.{part}",)
                found.append(Change(f"{name}.{part}", tuple(tensor.shape), copy))
    return {one.weight: one for one in found}


def _change_of_stack(name: str, module: Any, stack: str) -> Change:
    weight = stack_of(module, stack)
    assert weight is not None
    packed = weight.form if isinstance(weight, PackedWeight) else None
    return Change(
        name,
        tuple(weight.shape),
        (f"{PREFIX}{name}.lora_A", f"{PREFIX}{name}.lora_B"),
        scale=module.adapters[stack].scale,
        transposed=packed is None and bool(module.is_transposed),
        form=packed,
    )


@torch.no_grad()
def merged_weight(
    change: Change, base: Tensor, factors: Mapping[str, Tensor], sums: Sums
) -> Tensor:
    """Returns a weight with the adapter's change, rounded to its dtype, as the checkpoint holds it.

    ``base`` is the weight there, or dequantized; expert by expert, so that one matrix exists in
    float32 at a time. ``sums`` count what was kept.
    """
    if len(change.factors) == 1:  # A trained copy, which has no change to lose.
        return factors[change.factors[0]].to(base.dtype)
    merged = torch.empty_like(base)
    stack, result = (one if one.ndim == 3 else one[None] for one in (base, merged))
    for index in range(change.matrices()):
        delta = change.of(index, factors)
        delta = delta.T if change.transposed else delta
        old = stack[index].float()
        # Without a change, as at the start, every bit stays, that of -0 too.
        result[index].copy_(old + delta if bool(delta.any()) else stack[index])
        sums.add(old, delta, result[index].float())
    return merged


@torch.no_grad()
def merged_parts(
    change: Change, weight: PackedWeight, factors: Mapping[str, Tensor], sums: Sums
) -> Iterable[tuple[int | None, Parts]]:
    """Returns the packed parts of each matrix of a packed weight with the adapter's change."""
    form = weight.form
    for index in range(change.matrices()):
        place = index if len(change.shape) == 3 else None
        old = weight.dequantized(place).float()
        delta = change.of(index, factors)
        parts = weight.parts(place)
        if bool(delta.any()):
            parts = requantize(form, (old + delta).to(torch.bfloat16), parts)
        sums.add(old, delta, dequantize(form, parts).float())
        yield place, parts


def require_kept(report: MergeReport, floor: float, *, what: str) -> None:
    """Raises `InputError` if a merge keeps less of the change than ``floor``."""
    if report.total.kept >= floor:
        return
    worst = ", ".join(f"{one.name[:120]} {one.kept:.1%}" for one in report.worst(3))
    raise InputError(
        f"{what} keeps {report.total.kept:.1%} of the adapter's change, and the floor is "
        f"{floor:.0%}; least of {worst}",
        hint="serve the adapter unmerged, serve a wider format, or lower the floor",
    )
