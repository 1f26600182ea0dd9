"""Publishes parameters cast to one dtype, bf16, float16 or float32, and saved buffers as they are.

Buffers keep their dtype because they have no master copy: families keep the biases that balance
their routers in float32. Packed weights stay the bytes that they are.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from deltawire import codec
from deltawire.errors import CorruptError, InputError
from deltawire.export.shards import LocalShard, box_of, local_part, rows_of_rank, shard_of
from deltawire.placement.layout import TORCH_DTYPES, WIRE_DTYPES
from deltawire.placement.live import LiveWeights, module_tensors, saved_buffers
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec


def bf16(model: Any) -> CastWeights:
    """Publishes parameters as bf16."""
    return CastWeights(model, "BF16")


def f16(model: Any) -> CastWeights:
    """Publishes parameters as float16, whose steps are eight times finer than those of bf16. Its
    largest value is 65,504."""
    return CastWeights(model, "F16")


def f32(model: Any) -> CastWeights:
    """Publishes parameters as float32."""
    return CastWeights(model, "F32")


class CastWeights:
    """A `deltawire.export.source.WeightSource` whose parameters are published as ``dtype``, as
    safetensors names it; tied parameters are published once, and those of ``without`` are not.

    Raises `InputError` if the model saves anything that is neither a parameter nor a buffer, or a
    buffer with a dtype that the format lacks: readers would never get it. Publishing raises
    `InputError` with the name of a parameter that exceeds float16.
    """

    def __init__(self, model: torch.nn.Module, dtype: str, *, without: Container[str] = ()) -> None:
        self.compute_dtype = TORCH_DTYPES[dtype]
        self._model = model
        self._specs = [spec for spec in _specs(model, dtype) if spec.name not in without]

    def specs(self) -> list[TensorSpec]:
        """See `WeightSource.specs`."""
        return self._specs

    def tensors(self) -> dict[str, Tensor]:
        """See `WeightSource.tensors`."""
        held = module_tensors(self._model)
        return {
            spec.name: _published(held[spec.name], spec, of=held[spec.name]) for spec in self._specs
        }

    def trained(self) -> dict[str, Tensor]:
        """See `WeightSource.trained`: all but frozen parameters."""
        held = module_tensors(self._model)
        return {
            spec.name: _published(held[spec.name], spec, of=held[spec.name])
            for spec in self._specs
            if _may_change(held[spec.name])
        }

    def shards(self, rank: int, *, trained: bool = False) -> dict[str, LocalShard]:
        """See `WeightSource.shards`."""
        held = module_tensors(self._model)
        found = {}
        for spec in self._specs:
            if trained and not _may_change(held[spec.name]):
                continue
            dtype = TORCH_DTYPES[spec.dtype]
            shard = shard_of(spec.name, held[spec.name], rank=rank, dtype=dtype)
            if shard is not None:
                bits = _published(shard.bits, spec, of=held[spec.name]).reshape(-1)
                found[spec.name] = LocalShard(bits, shard.start)
        return found

    def wanted(self) -> dict[str, tuple[int, int] | None]:
        """See `WeightSource.wanted`."""
        held = module_tensors(self._model)
        rows = {spec.name: rows_of_rank(held[spec.name]) for spec in self._specs}
        return {name: one for name, one in rows.items() if one is None or one[0] < one[1]}

    @torch.no_grad()
    def restore(self, mirror: Mirror) -> None:
        """See `WeightSource.restore`."""
        held = module_tensors(self._model)
        if any(isinstance(tensor, DTensor) for tensor in held.values()):
            for spec in self._specs:
                restore_part(held[spec.name], spec, mirror)
        else:
            LiveWeights(self._model, self._specs).load(mirror)


def _may_change(tensor: Tensor) -> bool:
    """Returns whether a training step may change a tensor: all but frozen parameters."""
    return tensor.requires_grad or not isinstance(tensor, Parameter)


def restore_part(tensor: Tensor, spec: TensorSpec, mirror: Mirror) -> None:
    """Sets this rank's part of a tensor; raises `CorruptError` if it then holds different bits."""
    local = local_part(tensor)
    if not local.numel():
        return
    values = published_part(tensor, spec, mirror)
    local.copy_(values)
    part = codec.bits_of(values, spec.dtype).reshape(-1)
    if not np.array_equal(codec.bits_of(cast(local, spec.dtype), spec.dtype).reshape(-1), part):
        raise CorruptError(
            "the model's bits differ from those that were loaded", version=mirror.version
        )


def published_part(tensor: Tensor, spec: TensorSpec, mirror: Mirror) -> Tensor:
    """Returns a version's values of this rank's part of a tensor, in the published dtype and in
    the part's shape. Raises `InputError` if the mirror lacks some of them."""
    local = local_part(tensor)
    whole = (spec.shape, (0,) * len(spec.shape))
    shape, offset = box_of(tensor) if isinstance(tensor, DTensor) else whole
    rows = rows_of_rank(tensor) or (0, spec.shape[0] if spec.shape else 1)
    width = spec.count // spec.shape[0] if spec.shape and spec.shape[0] else 1
    found = mirror.find(spec.name, rows[0] * width, (rows[1] - rows[0]) * width)
    if found is None:
        raise InputError(
            f"the mirror lacks rows {rows[0]} to {rows[1]} of {spec.name}", version=mirror.version
        )
    part = found.reshape(rows[1] - rows[0], *spec.shape[1:])
    for axis, (start, size) in enumerate(zip(offset[1:], shape[1:], strict=True), start=1):
        part = part.take(np.arange(start, start + size), axis) if size < part.shape[axis] else part
    part = np.ascontiguousarray(part).reshape(-1)
    values = torch.from_numpy(part.copy()).view(TORCH_DTYPES[spec.dtype])
    return values.view(local.shape)


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """Rounds this rank's part of a tensor to ``dtype``: a contiguous CPU tensor, not copied if it
    is one already."""
    return local_part(tensor).to("cpu", TORCH_DTYPES[dtype]).contiguous()


def _published(part: Tensor, spec: TensorSpec, *, of: Tensor) -> Tensor:
    """Casts a part ``of`` a tensor; raises `InputError` if a value of a float16 parameter is not
    finite.

    The trainer rounds its weights after a step, so the values may be infinite before the cast.
    Readers that serve float32 could not tell one NaN from another. Buffers may hold infinities,
    such as those of a mask.
    """
    values = cast(part, spec.dtype)
    if spec.dtype == "F16" and isinstance(of, Parameter) and not bool(values.isfinite().all()):
        fault = "is not a number" if bool(values.isnan().any()) else "is beyond 65,504"
        raise InputError(
            f"{spec.name} has a value that {fault}, which float16 cannot hold",
            hint='lower train.learning_rate, or start a run with train.exporter = "bf16"',
        )
    return values


def _specs(model: torch.nn.Module, dtype: str) -> list[TensorSpec]:
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if strange := sorted(model.state_dict().keys() - known):
        raise InputError(f"the model saves {strange[0]}, which is neither a parameter nor a buffer")
    buffers = saved_buffers(model)
    for name, buffer in buffers.items():
        if buffer.dtype not in WIRE_DTYPES:
            raise InputError(f"the model's buffer {name} is {buffer.dtype}, which has no wire type")
    specs = [
        TensorSpec(
            name,
            tuple(tensor.shape),
            dtype
            if isinstance(tensor, Parameter) and tensor.is_floating_point()
            else WIRE_DTYPES[tensor.dtype],
        )
        for name, tensor in module_tensors(model).items()
    ]
    return sorted(specs, key=lambda spec: spec.name)
