"""Publishes parameters cast to one dtype, and saved buffers as they are: ``bf16`` and ``f32``.

Buffers keep their dtype because they have no master copy: families keep the biases that balance
their routers in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deltawire.errors import InputError
from deltawire.placement.layout import TORCH_DTYPES, WIRE_DTYPES
from deltawire.placement.live import LiveWeights, module_tensors, saved_buffers
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec


def bf16(model: Any) -> CastWeights:
    """Publishes parameters as bf16."""
    return CastWeights(model, "BF16")


def f32(model: Any) -> CastWeights:
    """Publishes parameters as float32."""
    return CastWeights(model, "F32")


class CastWeights:
    """A `deltawire.export.source.WeightSource` whose parameters are published as ``dtype``, as
    safetensors names it; tied parameters are published once.

    Raises `InputError` if the model saves anything that is neither a parameter nor a buffer, or a
    buffer whose dtype the format does not have: readers would never get it.
    """

    def __init__(self, model: torch.nn.Module, dtype: str) -> None:
        self.compute_dtype = TORCH_DTYPES[dtype]
        self._model = model
        self._specs = _specs(model, dtype)

    def specs(self) -> list[TensorSpec]:
        """See `WeightSource.specs`."""
        return self._specs

    def tensors(self) -> dict[str, Tensor]:
        """See `WeightSource.tensors`."""
        held = module_tensors(self._model)
        return {spec.name: cast(held[spec.name], spec.dtype) for spec in self._specs}

    def trained(self) -> dict[str, Tensor]:
        """See `WeightSource.trained`: all but frozen parameters."""
        held = module_tensors(self._model)
        return {
            spec.name: cast(held[spec.name], spec.dtype)
            for spec in self._specs
            if held[spec.name].requires_grad or not isinstance(held[spec.name], Parameter)
        }

    def restore(self, mirror: Mirror) -> None:
        """See `WeightSource.restore`."""
        LiveWeights(self._model, self._specs).load(mirror)


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """Rounds a tensor to ``dtype``: a contiguous CPU tensor, not copied if it is one already."""
    return tensor.detach().to("cpu", TORCH_DTYPES[dtype]).contiguous()


def _specs(model: torch.nn.Module, dtype: str) -> list[TensorSpec]:
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if strange := sorted(model.state_dict().keys() - known):
        raise InputError(f"the model saves {strange[0]}, which is no parameter and no buffer")
    buffers = saved_buffers(model)
    for name, buffer in buffers.items():
        if buffer.dtype not in WIRE_DTYPES:
            raise InputError(f"the model's buffer {name} is {buffer.dtype}, which has no wire type")
    specs = [
        TensorSpec(
            name,
            tuple(tensor.shape),
            dtype if isinstance(tensor, Parameter) else WIRE_DTYPES[tensor.dtype],
        )
        for name, tensor in module_tensors(model).items()
    ]
    return sorted(specs, key=lambda spec: spec.name)
