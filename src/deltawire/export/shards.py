"""What a torch trainer publishes: a module's saved tensors, or this rank's shards of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from deltawire import codec
from deltawire.errors import InputError
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec


class LocalShard(NamedTuple):
    """This rank's range of a tensor: flat elements from ``start`` on, on the CPU."""

    bits: Tensor
    start: int


@torch.no_grad()
def saved_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """The module's state on the CPU, contiguous: what `sync.open_publisher` and ``publish`` take.

    Tensors that lie there so already are not copied, and tied ones stay tied.
    """
    moved: dict[tuple[object, ...], Tensor] = {}
    found = {}
    for name, tensor in module.state_dict().items():
        # Views of one memory may differ in any of these: a transposed one, for example.
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place not in moved:
            moved[place] = tensor.detach().cpu().contiguous()
        found[name] = moved[place]
    return found


@torch.no_grad()
def local_shards(module: torch.nn.Module, *, rank: int) -> dict[str, LocalShard]:
    """What this rank holds of a module sharded by FSDP2, as `sync.ShardPublisher` takes it.

    Tensors that are not sharded are rank 0's; of replicas of a shard the first counts. Raises
    `InputError` for a tensor that is sharded along another dimension than its first.
    """
    found: dict[str, LocalShard] = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, DTensor):
            shard = _shard_of(name, tensor)
        else:
            shard = LocalShard(tensor.detach(), 0) if rank == 0 else None
        if shard is not None and shard.bits.numel():
            found[name] = LocalShard(shard.bits.cpu().contiguous().reshape(-1), shard.start)
    return found


def _shard_of(name: str, tensor: DTensor) -> LocalShard | None:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            if index:
                return None
        elif not isinstance(placement, Shard) or placement.dim != 0:
            raise InputError(
                f"tensor {name} is placed as {placement}",
                hint="shard along the first dimension, or gather the tensor before",
            )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise InputError(f"tensor {name} holds {tuple(local.shape)} where {shape} belong")
    width = tensor.numel() // tensor.shape[0] if tensor.ndim and tensor.shape[0] else 1
    return LocalShard(local, int(offset[0]) * width if len(offset) else 0)


def sharded_table(module: torch.nn.Module) -> list[TensorSpec]:
    """The tensor table of the whole module, in name order, from any one rank of it."""
    return sorted(
        (
            TensorSpec(
                name,
                tuple(tensor.shape),
                codec.dtype_of(torch.empty(0, dtype=tensor.dtype)),
            )
            for name, tensor in module.state_dict().items()
        ),
        key=lambda spec: spec.name,
    )


def shard_digest(shards: dict[str, LocalShard]) -> codec.Digest:
    """The shards' share of the model's digest: summed over the ranks it is the whole."""
    total = codec.ZERO
    for name, shard in shards.items():
        total += codec.digest_bits(name, codec.bits_of(shard.bits), shard.start)
    return total


def shard_mirror(shards: dict[str, LocalShard]) -> Mirror:
    """A mirror of the shards' ranges that holds no version yet."""
    return Mirror(
        {name: codec.bits_of(shard.bits).copy() for name, shard in shards.items()},
        -1,
        codec.ZERO,
        {name: shard.start for name, shard in shards.items() if shard.start},
    )
