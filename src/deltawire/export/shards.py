"""Publishes the module of a torch trainer as it is saved: whole, or one rank's FSDP2 shards."""

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
    """One rank's range of a tensor: its flat elements from ``start`` on, on the CPU."""

    bits: Tensor
    start: int


@torch.no_grad()
def saved_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the module's state as contiguous CPU tensors, for `sync.open_publisher` and
    ``publish``. Tensors that are so already are not copied, and tied ones stay tied."""
    moved: dict[tuple[object, ...], Tensor] = {}
    found = {}
    for name, tensor in module.state_dict().items():
        # Views of one memory may differ in any of these, as a transposed one does.
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place not in moved:
            moved[place] = tensor.detach().cpu().contiguous()
        found[name] = moved[place]
    return found


class ShardedWeights:
    """Publishes one rank's part of a module that FSDP2 has sharded, each tensor in its own dtype.

    Tensors that are not sharded are published by rank 0, a replicated shard by its first holder.

    Example::

        weights = ShardedWeights(model, rank=rank)
        publisher = ShardPublisher(bucket, run, weights.mirror(), rank=rank, ...)
        publisher.publish({name: shard.bits for name, shard in weights.tensors().items()})
    """

    def __init__(self, module: torch.nn.Module, *, rank: int) -> None:
        self._module = module
        self._rank = rank

    def specs(self) -> list[TensorSpec]:
        """Returns the tensor table of the whole module, in name order; equal on all ranks."""
        return sorted(
            (
                TensorSpec(
                    name,
                    tuple(tensor.shape),
                    codec.dtype_of(torch.empty(0, dtype=tensor.dtype)),
                )
                for name, tensor in self._module.state_dict().items()
            ),
            key=lambda spec: spec.name,
        )

    @torch.no_grad()
    def tensors(self) -> dict[str, LocalShard]:
        """Returns this rank's shards by name. Raises `InputError` for a tensor that is sharded
        along another dimension than its first."""
        found: dict[str, LocalShard] = {}
        for name, tensor in self._module.state_dict().items():
            shard = shard_of(name, tensor, rank=self._rank)
            if shard is not None:
                found[name] = LocalShard(shard.bits.cpu().contiguous().reshape(-1), shard.start)
        return found

    def digest(self) -> codec.Digest:
        """Returns this rank's part of the model's digest; all ranks' parts add up to the whole."""
        total = codec.ZERO
        for name, shard in self.tensors().items():
            total += codec.digest_bits(name, codec.bits_of(shard.bits), shard.start)
        return total

    def mirror(self) -> Mirror:
        """Returns a mirror of this rank's ranges that holds no version yet."""
        shards = self.tensors()
        return Mirror(
            {name: codec.bits_of(shard.bits).copy() for name, shard in shards.items()},
            -1,
            codec.ZERO,
            {name: shard.start for name, shard in shards.items() if shard.start},
        )


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory, as a plain tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Shards with hooks for FSDP2's gathers wrap their values.
    values: Tensor = getattr(local, "values32", local)
    return values.detach()


def rows_of_rank(tensor: Tensor) -> tuple[int, int] | None:
    """Returns this rank's rows (first, end) of a tensor that is sharded along its first dimension;
    None if it holds, or needs, all of them."""
    if not isinstance(tensor, DTensor) or not _by_rows(tensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if not len(shape) or shape[0] == tensor.shape[0]:
        return None
    return int(offset[0]), int(offset[0]) + int(shape[0])


def shard_of(name: str, tensor: Tensor, *, rank: int) -> LocalShard | None:
    """Returns the range of a tensor that this rank publishes, None if it publishes nothing of it.

    What is not sharded is rank 0's, a replicated shard its first holder's. Raises `InputError` for
    a tensor that is sharded along another dimension than its first.
    """
    if not isinstance(tensor, DTensor):
        return LocalShard(local_part(tensor), 0) if rank == 0 and tensor.numel() else None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    if not _by_rows(tensor):
        raise InputError(
            f"tensor {name} is placed as {tensor.placements}",
            hint="shard it along its first dimension, or gather it before publishing",
        )
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if isinstance(placement, Replicate) and index:
            return None
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = local_part(tensor)
    if tuple(local.shape) != tuple(shape):
        raise InputError(f"tensor {name} holds {tuple(local.shape)} where {shape} is expected")
    if not local.numel():
        return None
    width = tensor.numel() // tensor.shape[0] if tensor.ndim and tensor.shape[0] else 1
    return LocalShard(local, int(offset[0]) * width if len(offset) else 0)


def _by_rows(tensor: DTensor) -> bool:
    """Returns whether each rank holds consecutive rows."""
    return all(
        isinstance(one, Replicate) or (type(one) is Shard and one.dim == 0)
        for one in tensor.placements
    )
