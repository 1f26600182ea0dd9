"""Compares the bits of two versions, of one run or of two with the same tensors.

The changed weights are counted by layer and by kind of tensor. ``rank`` is the effective rank of
the update of a matrix: the exponential of the entropy of its squared singular values, taken as
shares (Roy and Vetterli, 2007), so that one direction gives 1, and n equal ones give n.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError
from deltawire.store import Bucket
from deltawire.sync import load_mirror
from deltawire.watch.weights import MAX_MEASURED_BYTES, WeightChanges, layer_and_part, values_of
from deltawire.wire.run import Run, TensorSpec

MAX_RANK_ELEMENTS = 1 << 22
"""Elements of the largest matrix whose rank is computed."""
MOVERS = 10
_KIND = re.compile(r"\.?(?:weight|bias|lora_[AB].*)\Z")


class MovedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor and what changed in it. ``norm`` is the Euclidean norm of the update, ``relative``
    the same over the norm of the old values, ``rank`` the effective rank of the update; None for a
    tensor without finite numbers or without two dimensions, or where it is too large."""

    name: str
    count: int
    changed: int
    norm: float | None = None
    relative: float | None = None
    rank: float | None = None


class ChangedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The changed weights of a layer, or of all tensors of one kind."""

    name: str
    count: int
    changed: int
    norm: float


class BitDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of two versions: ``movers`` are the tensors with the largest updates, by
    their norm over that of the old values."""

    count: int
    changed: int
    norm: float
    layers: list[ChangedPart]
    kinds: list[ChangedPart]
    movers: list[MovedTensor]


def compare_bits(old: tuple[Bucket, Run, int], new: tuple[Bucket, Run, int]) -> BitDifference:
    """Compares two versions, each given as its bucket, run and number.

    Raises `InputError` if their tensors differ in name, shape or dtype, or for a model larger than
    `MAX_MEASURED_BYTES`, and whatever loading raises.
    """
    _check_alike(old[1], new[1])
    for bucket, run, _ in (old, new):
        size = WeightChanges(bucket, run).bytes_full
        if size > MAX_MEASURED_BYTES:
            raise InputError(
                f"the model has {size / 1e9:.1f} GB; bits are compared up to "
                f"{MAX_MEASURED_BYTES / 1e9:.1f} GB",
                run=bucket.url,
            )
    before = load_mirror(old[0], old[1], at=old[2]).tensors
    after = load_mirror(new[0], new[1], at=new[2]).tensors
    moved = [_moved(spec, before[spec.name], after[spec.name]) for spec in new[1].tensors]
    layers: dict[tuple[int, str], list[MovedTensor]] = {}
    kinds: dict[str, list[MovedTensor]] = {}
    for one in moved:
        layer, part = layer_and_part(one.name)
        key = (1 << 30, part.split(".")[0]) if layer is None else (layer, f"layer {layer}")
        layers.setdefault(key, []).append(one)
        kinds.setdefault(_KIND.sub("", part) or part, []).append(one)
    order = sorted((one for one in moved if one.relative), key=lambda one: -(one.relative or 0))
    shapes = {spec.name: (spec.shape, spec.dtype) for spec in new[1].tensors}
    return BitDifference(
        count=sum(one.count for one in moved),
        changed=sum(one.changed for one in moved),
        norm=_norm(moved),
        layers=[_part(name, layers[_, name]) for _, name in sorted(layers)],
        kinds=[_part(name, kinds[name]) for name in sorted(kinds)],
        movers=[
            msgspec.structs.replace(
                one, rank=_rank(before[one.name], after[one.name], *shapes[one.name])
            )
            for one in order[:MOVERS]
        ],
    )


def _check_alike(old: Run, new: Run) -> None:
    theirs = {one.name: one for one in old.tensors}
    ours = {one.name: one for one in new.tensors}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise InputError(
                f"the two hold different models: tensor {name[:80]!r} differs in shape or dtype, "
                "or only one has it"
            )


def _moved(spec: TensorSpec, old: NDArray[Any], new: NDArray[Any]) -> MovedTensor:
    changed = int(np.count_nonzero(old != new))
    before, after = values_of(old, spec.dtype), values_of(new, spec.dtype)
    if before is None or after is None:
        return MovedTensor(name=spec.name, count=spec.count, changed=changed)
    at = np.flatnonzero(old != new)
    with np.errstate(all="ignore"):  # Weights may be NaN or infinite.
        norm = float(np.linalg.norm(after[at].astype(np.float64) - before[at]))
        whole = float(np.sqrt(np.square(before, dtype=np.float64).sum()))
    if not math.isfinite(norm + whole):
        return MovedTensor(name=spec.name, count=spec.count, changed=changed)
    return MovedTensor(
        name=spec.name,
        count=spec.count,
        changed=changed,
        norm=norm,
        relative=norm / whole if whole else None,
    )


def _part(name: str, tensors: list[MovedTensor]) -> ChangedPart:
    return ChangedPart(
        name=name,
        count=sum(one.count for one in tensors),
        changed=sum(one.changed for one in tensors),
        norm=_norm(tensors),
    )


def _norm(tensors: list[MovedTensor]) -> float:
    return math.sqrt(sum((one.norm or 0.0) ** 2 for one in tensors))


def _rank(old: NDArray[Any], new: NDArray[Any], shape: Sequence[int], dtype: str) -> float | None:
    """Returns the effective rank of the update of a matrix."""
    before, after = values_of(old, dtype), values_of(new, dtype)
    if len(shape) != 2 or old.size > MAX_RANK_ELEMENTS or before is None or after is None:
        return None
    update = (after.astype(np.float64) - before).reshape(shape)
    small = update if shape[0] <= shape[1] else update.T
    energy = np.clip(np.linalg.eigvalsh(small @ small.T), 0, None)
    if not np.isfinite(energy).all() or not energy.sum():
        return None
    share = energy[energy > 0] / energy.sum()
    return float(np.exp(-(share * np.log(share)).sum()))
