"""Pairs of weights: what a publisher held before and after some optimizer steps.

A pair on disk is an ``.npz`` of three arrays a tensor, none of them pickled:

| key | dtype | content |
|---|---|---|
| ``old/NAME`` | int16, shaped | the bf16 bits before |
| ``idx/NAME`` | uint32[N] | the flat positions that changed, ascending |
| ``new/NAME`` | int16[N] | the bits after, at those positions |
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError

DTYPE = "BF16"
"""The wire dtype of every pair."""

Bf16Bits = NDArray[np.uint16]


@dataclass(frozen=True)
class PairTensor:
    """One tensor of a pair: uint16 bits before and after, of one shape, both contiguous."""

    old: Bf16Bits
    new: Bf16Bits


@dataclass(frozen=True)
class Pair:
    """Two versions of a model's weights, tensor by tensor."""

    name: str
    tensors: dict[str, PairTensor]

    @property
    def elements(self) -> int:
        """Weights in it."""
        return sum(tensor.old.size for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Bytes of one version of it."""
        return 2 * self.elements

    @property
    def changed(self) -> int:
        """Weights whose bits differ."""
        return sum(
            int(np.count_nonzero(tensor.old != tensor.new)) for tensor in self.tensors.values()
        )


def save_pair(path: Path, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> float:
    """Writes a pair atomically; returns the share of weights that changed."""
    arrays: dict[str, NDArray[Any]] = {}
    changed = elements = 0
    for name, before in old.items():
        after = new[name]
        positions = np.flatnonzero(before.reshape(-1) != after.reshape(-1)).astype(np.uint32)
        arrays[f"old/{name}"] = before.view(np.int16)
        arrays[f"idx/{name}"] = positions
        arrays[f"new/{name}"] = after.reshape(-1)[positions].view(np.int16)
        changed += positions.size
        elements += before.size
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part.npz")
    np.savez(unfinished, allow_pickle=False, **arrays)
    unfinished.rename(path)
    return changed / max(elements, 1)


def load_pair(path: Path) -> Pair:
    """Reads a pair. Raises InputError for a file that is not one."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = [key.removeprefix("old/") for key in archive.files if key.startswith("old/")]
            tensors = {name: _load_tensor(archive, name) for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} is not a pair of weights: {error}",
            hint="deltawire bench deltas makes them",
        ) from error
    if not tensors:
        raise InputError(f"{path} holds no pair of weights", hint="its keys should be old/NAME …")
    return Pair(path.stem, tensors)


def _load_tensor(archive: Any, name: str) -> PairTensor:
    old, positions, bits = archive[f"old/{name}"], archive[f"idx/{name}"], archive[f"new/{name}"]
    if old.dtype != np.int16 or bits.dtype != np.int16 or positions.dtype != np.uint32:
        raise ValueError(f"{name} has other dtypes than int16, uint32 and int16")
    if positions.shape != bits.shape or positions.ndim != 1:
        raise ValueError(f"{name} has {positions.shape} positions and {bits.shape} new values")
    if positions.size and int(positions.max()) >= old.size:
        raise ValueError(f"{name} changes outside of its {old.size} elements")
    before = np.ascontiguousarray(old).view(np.uint16)
    after = before.copy()
    after.reshape(-1)[positions] = bits.view(np.uint16)
    return PairTensor(before, after)


def find_pairs(places: list[str]) -> list[Path]:
    """The ``.npz`` files named, and those in the folders named, sorted within each.

    Raises InputError for a path that is neither.
    """
    found: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(path for path in place.glob("*.npz") if ".part" not in path.name)
            if not inside:
                raise InputError(f"there are no .npz files in {place}")
            found += inside
        elif place.is_file():
            found.append(place)
        else:
            raise InputError(f"there is no file or folder {place}")
    return found
