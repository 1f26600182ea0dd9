"""Shards a model's fp32 master weights over ranks with FSDP2.

The parameters of the sharded model are the masters: each rank holds its rows in float32, and a
layer's parameters exist whole only while the layer computes, as the bits that are published:

- ``compute = "bfloat16"``: gathered and computed in bf16, reduced in float32.
- ``compute = "float32"``: gathered rounded to the published dtype, computed in float32
  (`deltawire.train.parallel.rounding`).

Packed frozen weights are sharded and gathered as the uint8 that they are, and dequantized one
matrix at a time. Tensor and expert parallelism divide parameters first; FSDP2 then shards each
rank's parts.

Gradients are summed over ranks and not averaged: a loss divides by the tokens of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from deltawire.errors import BugError, InputError
from deltawire.export.shards import placed_like
from deltawire.placement.live import published_names
from deltawire.train.parallel.expert_parallel import divide_experts
from deltawire.train.parallel.mesh import TrainerMesh
from deltawire.train.parallel.rounding import RoundedShard
from deltawire.train.parallel.tensor_parallel import divide_layers


def shard_model(
    model: Any,
    mesh: TrainerMesh,
    *,
    compute: torch.dtype = torch.float32,
    published: torch.dtype = torch.float32,
    frozen: nn.Module | None = None,
) -> None:
    """Shards ``model`` in place: each decoder layer, then the rest.

    The parameters become float32 DTensors. Those on the meta device get memory on the mesh's device
    for this rank's shard only, with values unset. ``published`` is the dtype that a forward pass
    rounds them to, ``compute`` the one that it computes in. A model that is sharded already stays
    as it is. Frozen parameters get the memory of those of the same published names in the sharded
    model ``frozen``. Raises `InputError` if ``compute`` would change the published bits.

    Example::

        shard_model(model, open_mesh(config.train, device), published=torch.bfloat16)
    """
    if isinstance(model, FSDPModule):
        return
    if mesh.data is None:
        raise BugError("a mesh without axes shards nothing")
    if compute not in (torch.float32, published):
        raise InputError(
            f"train.compute {_name(compute)} would not compute with the published "
            f"{_name(published)} weights",
            hint='set train.compute = "float32", or train.exporter = "bf16"',
        )
    layers = layers_of(model)
    if mesh.tensor is not None:
        divide_layers(model, mesh.tensor)
    experts = divide_experts(model, mesh)
    _to_masters(model, None if compute == published else published)
    # Nothing is cast at module borders: activations have the dtype that the layers give them, as
    # in the sampler. Experts sharded separately would otherwise get their gates rounded.
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    # The root too gives up its gathered weights after a forward pass: what reads parameters between
    # two passes must find the masters.
    settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": True}
    if mesh.expert is not None:
        # Fewer ranks share a rank's experts than the rest of the layer.
        for module in experts:
            fully_shard(module, mesh=mesh.expert_data, **settings)
    for layer in layers:
        fully_shard(layer, mesh=mesh.data, **settings)
    fully_shard(model, mesh=mesh.data, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if frozen is not None:
        _share_frozen(model, frozen)
    _give_memory(model, mesh.device)


def to_device(model: Any, device: torch.device) -> Any:
    """Moves a model whose parameters may have no memory; those stay on the meta device."""
    return model._apply(lambda one: one if one.is_meta else one.to(device))


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model, some of whose parameters may have no memory yet."""
    tensors = (*model.parameters(), *model.buffers())
    return next((one.device for one in tensors if not one.is_meta), torch.device("cpu"))


@torch.no_grad()
def _share_frozen(model: nn.Module, frozen: nn.Module) -> None:
    """Replaces frozen shards by ones over the memory of those of another model."""
    names, given = published_names(model), published_names(frozen)
    held = {given[name]: one for name, one in frozen.named_parameters() if not one.requires_grad}
    wanted = {id(one): names[name] for name, one in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own: dict[str, Any] = module._parameters
        for name, parameter in list(own.items()):
            if not isinstance(parameter, DTensor) or parameter.requires_grad:
                continue
            if id(parameter) not in made:
                other: Any = held[wanted[id(parameter)]]
                made[id(parameter)] = nn.Parameter(
                    placed_like(parameter, other._local_tensor), requires_grad=False
                )
            module._parameters[name] = made[id(parameter)]


@torch.no_grad()
def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Replaces sharded parameters on the meta device by ones with memory; tied ones stay tied.
    FSDP2 takes them over before the first forward pass."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        held: dict[str, Any] = module._parameters
        for name, parameter in list(held.items()):
            if not isinstance(parameter, DTensor) or not parameter.to_local().is_meta:
                continue
            if id(parameter) not in made:
                local = torch.empty_like(parameter.to_local(), device=device)
                made[id(parameter)] = nn.Parameter(
                    placed_like(parameter, local), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that the model's family never divides, such as its decoder layers."""
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@torch.no_grad()
def _to_masters(model: nn.Module, rounded: torch.dtype | None) -> None:
    """Makes every parameter but packed ones float32, and one that is gathered rounded if
    ``rounded`` is a dtype; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_floating_point():
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    _master(parameter.detach(), rounded), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]


def _master(values: Tensor, rounded: torch.dtype | None) -> Tensor:
    if isinstance(values, DTensor):
        return placed_like(values, _master(values.to_local(), rounded))
    wide = values.float().contiguous()
    return wide if rounded in (None, torch.float32) else RoundedShard(wide, rounded)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
