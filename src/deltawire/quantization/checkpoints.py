"""Reads model directories whose weights are packed, tensor by tensor.

Known layouts, by ``quantization_config`` in config.json:

======================  ===============================================================
compressed-tensors      int4 in groups of 32, int8 rows, MXFP4, NVFP4, fp8 blocks
``quant_method: mxfp4``  gpt-oss: ``NAME_blocks`` and ``NAME_scales``
``quant_method: fp8``    DeepSeek-V3: ``NAME.weight`` and ``NAME.weight_scale_inv``
(none)                  plain tensors
======================  ===============================================================

A weight's name is that of the plain checkpoint, such as ``model.layers.0.mlp.up_proj.weight``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from deltawire.errors import CorruptError, InputError
from deltawire.packed_formats import PACKED
from deltawire.quantization.formats import PackedFormat, naming, open_format


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a directory: ``parts`` is empty if it is stored plain, under its own name."""

    name: str
    parts: Mapping[str, str]


class PackedCheckpoint:
    """The safetensors files of a model directory, opened for reading.

    ``form`` is the format of its packed weights, None if it has none. Raises `InputError` for a
    scheme that is not among the formats, and `CorruptError` for files that cannot be read.

    Example::

        with PackedCheckpoint(folder) as checkpoint:
            for weight in checkpoint.weights():
                parts = checkpoint.read_packed(weight) if weight.parts else None
    """

    def __init__(self, folder: Path) -> None:
        self.form = _format_of(folder)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = self._open.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
        except Exception as error:  # safetensors raises different types for different faults
            self._open.close()
            raise CorruptError(f"cannot read the weights in {folder}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def weights(self) -> Iterator[StoredWeight]:
        """Yields all weights in name order."""
        used: set[str] = set()
        found = []
        for name in self._files:
            parts = self._parts_of(name)
            if parts:
                used.update(parts.values(), [f"{name.removesuffix('_packed')}_shape"])
                found.append(StoredWeight(_unpacked_name(name), parts))
        found += [StoredWeight(name, {}) for name in self._files if name not in used]
        yield from sorted(found, key=lambda one: one.name)

    def read(self, weight: StoredWeight) -> Tensor:
        """Returns a weight that is stored plain."""
        return self._tensor(weight.name)

    def read_packed(self, weight: StoredWeight) -> dict[str, Tensor]:
        """Returns the parts of a packed weight, as its format has them.

        Raises `CorruptError` if they do not fit each other.
        """
        assert self.form is not None
        parts = {part: self._tensor(name) for part, name in weight.parts.items()}
        codes = parts["codes"]
        if codes.ndim > 2 and weight.parts["codes"].endswith("_blocks"):
            codes = codes.flatten(-2)  # gpt-oss: [E, rows, groups, 16]
        codes = codes.contiguous().view(torch.uint8)
        if weight.parts["codes"].endswith("_packed") and self._stores("shape"):
            stated = self._tensor(f"{weight.name}_shape").tolist()
            if codes.shape[-1] * 2 != stated[-1]:
                raise CorruptError(
                    f"{weight.name[:200]} has {stated[-1]} columns, and codes for "
                    f"{codes.shape[-1] * 2}"
                )
        parts["codes"] = codes
        scales = parts["scales"]
        if self.form.name == "fp8-block" or scales.dtype != self.form.scale_dtype:
            exact = scales.to(self.form.scale_dtype)
            if not torch.equal(exact.to(scales.dtype).float(), scales.float()):
                raise CorruptError(f"the scales of {weight.name[:200]} are {scales.dtype}")
            parts["scales"] = exact
        if "global_scale" in parts:
            parts["global_scale"] = parts["global_scale"].float().expand(codes.shape[:-1])
        shape = (*codes.shape[:-1], codes.shape[-1] * 8 // self.form.bits)
        with naming(weight.name):
            self.form.check(parts, tuple(shape))
        return parts

    def _parts_of(self, name: str) -> dict[str, str]:
        """Returns the parts of a packed weight whose codes have this name; empty for other
        names.
        """
        if self.form is None:
            return {}
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            parts = {"codes": name, "scales": f"{stem}_scale"}
            if self._stores("global_scale"):
                parts["global_scale"] = f"{stem}_global_scale"
        elif name.endswith("_blocks"):
            parts = {"codes": name, "scales": f"{name.removesuffix('_blocks')}_scales"}
        elif name.endswith(".weight") and f"{name}_scale_inv" in self._files:
            parts = {"codes": name, "scales": f"{name}_scale_inv"}
        elif name.endswith(".weight") and f"{name}_scale" in self._files:
            parts = {"codes": name, "scales": f"{name}_scale"}
        else:
            return {}
        if missing := [one for one in parts.values() if one not in self._files]:
            raise CorruptError(f"the checkpoint lacks {missing[0][:200]}")
        return parts

    def _stores(self, what: str) -> bool:
        return self.form is not None and what in PACKED[self.form.name].also_stored

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise CorruptError(f"the checkpoint lacks {name[:200]}")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _unpacked_name(name: str) -> str:
    return name.removesuffix("_packed").removesuffix("_blocks")


def _format_of(folder: Path) -> PackedFormat | None:
    """Returns the format that a directory's configuration names."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {folder / 'config.json'}: {error}") from error
    settings = config.get("quantization_config") if isinstance(config, dict) else None
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise InputError(f"quantization_config in {folder} is not an object")
    method = settings.get("quant_method")
    if method == "mxfp4":
        return open_format("mxfp4")
    if method == "fp8" and settings.get("weight_block_size") == [128, 128]:
        return open_format("fp8-block")
    if method == "compressed-tensors":
        return _scheme_format(settings, folder)
    raise _unknown(f"quant_method {method!r}", folder)


def _scheme_format(settings: dict[str, Any], folder: Path) -> PackedFormat:
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    names = set()
    for scheme in schemes:
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if not isinstance(weights, dict):
            raise _unknown("a scheme without weights", folder)
        size = weights.get("group_size")
        strategy = weights.get("strategy")
        key = (
            weights.get("type"),
            weights.get("num_bits"),
            strategy,
            size if strategy in ("group", "tensor_group") else None,
        )
        block = weights.get("block_structure") if strategy == "block" else None
        known = [
            name
            for name, one in PACKED.items()
            if one.scheme == key and one.weights.get("block_structure") == block
        ]
        if not known or not weights.get("symmetric", True) or weights.get("actorder"):
            raise _unknown(f"weights of {key}, symmetric={weights.get('symmetric', True)}", folder)
        names.add(known[0])
    if len(names) != 1:
        raise _unknown(f"{len(names)} schemes", folder)
    return open_format(names.pop())


def _unknown(what: str, folder: Path) -> InputError:
    return InputError(
        f"the packed checkpoint in {folder} has an unsupported grid: {what[:300]}",
        hint="known are int4 in groups of 32, int8 rows, MXFP4, NVFP4 and fp8 blocks of 128 x 128, "
        "all symmetric; or dequantize the checkpoint first",
    )
