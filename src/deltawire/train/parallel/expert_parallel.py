"""Divides the experts of each layer over ranks, and sends tokens to the ranks that have theirs.

Blocks of whole experts go to the ranks of ``expert`` × ``tensor``. Ranks of one ``expert`` group
compute different tokens and exchange them; ranks that differ in ``tensor`` hold the same tokens, so
each takes those of its own experts and the results are added up::

    router ─▶ pairs (token, expert) ─┐ all-to-all ┌─▶ own experts ─┐ all-to-all ┌─▶ weigh, add
    router ─▶ pairs (token, expert) ─┘            └─▶ own experts ─┘            └─▶ weigh, add

Packed stacks and the adapters of experts are divided as others are; a factor that all experts share
is on every rank, and its gradient is the sum over them. Routers stay whole on every rank and choose
before tokens leave, so replayed choices need nothing here. The experts' own code computes what
arrives, whatever its activation, biases and backend.

Shapes: T tokens, K experts chosen for each, H hidden; P pairs on the rank that chose, R arriving
where the experts are; E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from deltawire.errors import InputError
from deltawire.quantization.experts import ExpertAdapter
from deltawire.quantization.linear import PackedWeight
from deltawire.train.parallel.local_parts import added, copied, local_parameters
from deltawire.train.parallel.mesh import TrainerMesh


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Returns the model's stacks of experts, by name: modules of transformers' experts interface,
    which take hidden states [T, H], chosen experts [T, K] and their weights [T, K].
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    }


def divide_experts(model: nn.Module, mesh: TrainerMesh) -> list[nn.Module]:
    """Replaces stacks of experts by DTensors that are divided along their first dimension, in
    place; returns the modules that hold them.

    Raises `InputError` for a model whose experts are stacked in another way, and for a number of
    experts that does not divide.
    """
    over = mesh.divides_experts
    if over is None:
        return []
    found = experts_of(model)
    if mesh.expert is not None and not found:
        raise InputError(
            f"expert_parallel = {mesh.expert.size()}: {type(model).__name__} has no experts that "
            "can be divided",
            hint="set train.expert_parallel = 1; FSDP shards all weights over all ranks",
        )
    for name, module in found.items():
        if module.num_experts % over.size():
            raise InputError(
                f"the {module.num_experts} experts of {name} do not divide over {over.size()} "
                "ranks (expert_parallel * tensor_parallel)",
                hint="use a divisor of it for train.expert_parallel * train.tensor_parallel",
            )
        _divide(name, module, over)
        module.forward = _dispatched(module, mesh)
    return list(found.values())


def _divide(name: str, module: Any, over: DeviceMesh) -> None:
    for holder in _holders(module):
        for key, parameter in list(holder.named_parameters(recurse=False)):
            shared = isinstance(holder, ExpertAdapter) and len(parameter) == 1
            if len(parameter) != module.num_experts and not shared:
                raise InputError(
                    f"{name}.{key} has {len(parameter)} rows for {module.num_experts} experts",
                    hint="set train.expert_parallel and train.tensor_parallel to 1",
                )
            placed = Replicate() if shared else Shard(0)
            part = distribute_tensor(
                parameter.detach(), over, [placed] * over.ndim, src_data_rank=None
            )
            holder.register_parameter(
                key, nn.Parameter(part, requires_grad=parameter.requires_grad)
            )
    module.num_experts //= over.size()


def _holders(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that hold the stacks of a module of experts: itself, its packed stacks
    and their adapters."""
    inner = [one for one in module.modules() if isinstance(one, PackedWeight | ExpertAdapter)]
    return [module, *inner]


def _dispatched(module: Any, mesh: TrainerMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the module's forward for experts that are divided over ranks."""
    own_forward: Callable[[Tensor, Tensor, Tensor], Tensor] = module.forward
    holders = _holders(module)
    tensor, held = mesh.tensor, module.num_experts
    width = 1 if tensor is None else tensor.size()
    number = 0 if tensor is None else tensor.get_local_rank()

    def forward(hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if tensor is not None:
            hidden_TH, weights_TK = copied(hidden_TH, tensor), copied(weights_TK, tensor)
        chosen_P = chosen_TK.reshape(-1)
        block_P = chosen_P // held
        order_P = torch.argsort(chosen_P, stable=True)
        if tensor is not None:
            order_P = order_P[(block_P % width == number)[order_P]]
        experts_P = chosen_P[order_P] % held
        route = _Exchange(mesh.expert, block_P[order_P] // width)
        # No buffer of an exchange has a name here: each is freed once the next one exists.
        rows_RH = route.there(torch.index_select(hidden_TH, 0, order_P // chosen_TK.shape[1]))
        with ExitStack() as parts:
            for holder in holders:
                parts.enter_context(local_parameters(holder))
            back_PH = route.back(_computed(own_forward, rows_RH, route.there(experts_P)))
        del rows_RH
        pairs_PH = back_PH.new_zeros(chosen_P.numel(), back_PH.shape[1])
        pairs_TKH = pairs_PH.index_copy(0, order_P, back_PH).view(*chosen_TK.shape, -1)
        del back_PH, pairs_PH
        # As the experts' own code does: weights apply to each pair's result, which then add up.
        sum_TH = (pairs_TKH * weights_TK[:, :, None]).sum(1)
        if tensor is not None:
            sum_TH = added(sum_TH, tensor).clone()  # FSDP2's hooks want no view.
        return sum_TH.to(hidden_TH.dtype)

    return forward


def _computed(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor], rows_RH: Tensor, experts_R: Tensor
) -> Tensor:
    """Returns the experts' results, not weighed. No rows at all become one whose result is dropped:
    every rank computes, so that every parameter has a gradient.
    """
    count = len(rows_RH)
    if not count:
        rows_RH = torch.cat([rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])])
        experts_R = experts_R.new_zeros(1)
    out_RH = forward(rows_RH, experts_R[:, None], rows_RH.new_ones(len(rows_RH), 1))
    return out_RH[:count]


class _Exchange:
    """Sends rows to other ranks of a group, and their results back.

    ``target_P`` is the rank that each row goes to, in ascending order. Without a group rows stay.
    """

    def __init__(self, mesh: DeviceMesh | None, target_P: Tensor) -> None:
        self._group = None if mesh is None else mesh.get_group()
        if mesh is None:
            return
        sent = torch.bincount(target_P, minlength=mesh.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        self._sent, self._received = sent.tolist(), received.tolist()

    def there(self, rows_P: Tensor) -> Tensor:
        """Returns the rows that other ranks sent to this one, in order of ranks."""
        return self._exchanged(rows_P, back=False)

    def back(self, rows_R: Tensor) -> Tensor:
        """Returns the results of the rows that this rank sent, in the order in which it sent
        them."""
        return self._exchanged(rows_R, back=True)

    def _exchanged(self, rows: Tensor, *, back: bool) -> Tensor:
        if self._group is None:
            return rows
        out, own = (self._sent, self._received) if back else (self._received, self._sent)
        moved: Any = all_to_all_single_autograd(rows.contiguous(), out, own, self._group)
        arrived: Tensor = moved.wait() if hasattr(moved, "wait") else moved
        return arrived
