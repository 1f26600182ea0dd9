"""Lists the tensors of a module that are published, and reads their bits."""

from __future__ import annotations

import torch

from deltawire.errors import InputError
from deltawire.placement.layout import TORCH_DTYPES, WIRE_DTYPES
from deltawire.wire.run import TensorSpec


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint of the model holds, by name, shared ones once."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def published_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that is published of a model, as it lives in it: parameters, tied ones once, and saved
    buffers."""
    return {**dict(model.named_parameters()), **saved_buffers(model)}


def published_specs(model: torch.nn.Module, dtype: str) -> list[TensorSpec]:
    """The tensor table of a model whose parameters are all published as ``dtype``, tied ones once,
    and saved buffers as what they are, in name order.

    Raises `InputError` if the model saves what is no tensor, or none that can be published: it
    would not reach the workers.
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if strange := sorted(model.state_dict().keys() - known):
        raise InputError(f"the model saves {strange[0]}, which is no parameter and no buffer")
    specs = [TensorSpec(name, tuple(p.shape), dtype) for name, p in model.named_parameters()]
    for name, buffer in saved_buffers(model).items():
        if buffer.dtype not in WIRE_DTYPES:
            raise InputError(f"the model's buffer {name} is {buffer.dtype}, which has no wire type")
        specs.append(TensorSpec(name, tuple(buffer.shape), WIRE_DTYPES[buffer.dtype]))
    return sorted(specs, key=lambda spec: spec.name)


def published_bits(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A weight rounded to ``dtype``: a contiguous CPU tensor, without a copy if it is one."""
    return tensor.detach().to("cpu", TORCH_DTYPES[dtype]).contiguous()
