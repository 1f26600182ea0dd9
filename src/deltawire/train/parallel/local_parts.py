"""Lets modules compute with this rank's parts of parameters that are divided over ranks.

Most of a model's code supports only plain tensors. A DTensor parameter is replaced by its local
part while the module computes; autograd turns the part's gradient into one of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


@contextmanager
def local_parameters(
    module: nn.Module, gradients: Sequence[Placement] | None = None
) -> Iterator[None]:
    """Replaces the module's own DTensor parameters by their local parts.

    ``gradients`` is how the parts' gradients are placed; by default as the parameters, and those of
    a replicated one are parts of a sum.
    """
    whole: dict[str, Any] = dict(module._parameters)
    parts: dict[str, Tensor] = {
        name: one.to_local(grad_placements=gradients or _gradients_of(one))
        for name, one in whole.items()
        if isinstance(one, DTensor)
    }
    held: dict[str, Any] = module._parameters
    held.update(parts)
    try:
        yield
    finally:
        held.update(whole)


def _gradients_of(parameter: DTensor) -> list[Placement]:
    return [Partial() if isinstance(one, Replicate) else one for one in parameter.placements]


def compute_on_parts(module: Any, gradients: Sequence[Placement] | None = None) -> None:
    """Makes every forward pass of ``module`` run with its `local_parameters`."""
    own_forward: Callable[..., Any] = module.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        with local_parameters(module, gradients):
            return own_forward(*arguments, **named)

    module.forward = forward


def copied(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the tensor itself, which all ranks of ``mesh`` hold, as the input of a part that each
    rank computes differently: its gradient is the sum over them.
    """
    shared = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def added(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the sum of all ranks' tensors; each gets the sum's gradient."""
    summands = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    return summands.redistribute(placements=[Replicate()]).to_local()
