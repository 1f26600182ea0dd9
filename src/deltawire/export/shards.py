"""Gives the published tensors of a torch trainer's module: whole, or one rank's FSDP2 shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from deltawire.errors import InputError


class LocalShard(NamedTuple):
    """One rank's range of a tensor: its flat elements from ``start`` on, on the CPU."""

    bits: Tensor
    start: int


@torch.no_grad()
def saved_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the module's state as contiguous CPU tensors, for `sync.open_publisher` and
    ``publish``. Contiguous CPU tensors are not copied, and tied ones stay tied.
    """
    moved: dict[tuple[object, ...], Tensor] = {}
    found = {}
    for name, tensor in module.state_dict().items():
        # Views of the same memory may differ in any of these, as a transposed view does.
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place not in moved:
            moved[place] = tensor.detach().cpu().contiguous()
        found[name] = moved[place]
    return found


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory, as a plain tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Shards with hooks for FSDP2's gathers wrap their values.
    values: Tensor = getattr(local, "values32", local)
    return values.detach()


def unwrapped_shard(tensor: Tensor) -> Tensor:
    """Returns the tensor with this rank's part as `local_part` returns it, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    return placed_like(tensor, local_part(tensor))


def placed_like(tensor: DTensor, local: Tensor) -> DTensor:
    """Returns a tensor of the same shape and placements whose part on this rank is ``local``."""
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def box_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's part of a tensor, and where in the tensor it begins."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(shape), tuple(offset)


def rows_of_rank(tensor: Tensor) -> tuple[int, int] | None:
    """Returns the rows (first, end) that this rank's part of a tensor lies in; None for all."""
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = box_of(tensor)
    if not len(shape) or shape[0] == tensor.shape[0]:
        return None
    return int(offset[0]), int(offset[0]) + int(shape[0])


def is_first_holder(tensor: DTensor) -> bool:
    """Returns whether no rank before this one holds the same part of a tensor.

    It has index 0 on each axis that replicates, and on each axis of the ranks' whole mesh that is
    none of the tensor's: norms that tensor parallelism leaves alone are on such a mesh.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    first = mesh._get_root_mesh().mesh.flatten()[0]
    if coordinate is None or not bool((mesh.mesh == first).any()):
        return False
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def shard_of(
    name: str, tensor: Tensor, *, rank: int, dtype: torch.dtype | None = None
) -> LocalShard | None:
    """Returns the range of a tensor that this rank publishes, None if it publishes nothing of it.

    Rank 0 publishes tensors that are not sharded; the first holder publishes a replicated shard.
    The values are rounded to ``dtype``, and shaped by rows; they may share memory with the tensor.
    A tensor that is divided along another dimension than its first is exchanged: afterwards each
    rank has some of its rows, so all ranks must call this together. Raises `InputError` for partial
    sums.
    """
    if not isinstance(tensor, DTensor):
        local = local_part(tensor)
        return LocalShard(_rounded(local, dtype), 0) if rank == 0 and tensor.numel() else None
    if tensor.device_mesh.get_coordinate() is None:
        return None
    for placement in tensor.placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            raise InputError(
                f"tensor {name} is placed as {tensor.placements}",
                hint="shard it, or reduce it before publishing",
            )
    local = _rounded(local_part(tensor), dtype)
    if not _by_rows(tensor):
        tensor = _exchanged(tensor, local)
        local = tensor.to_local()
    if not is_first_holder(tensor):
        return None
    shape, offset = box_of(tensor)
    if tuple(local.shape) != shape:
        raise InputError(f"tensor {name} holds {tuple(local.shape)} where {shape} is expected")
    if not local.numel():
        return None
    width = tensor.numel() // tensor.shape[0] if tensor.ndim and tensor.shape[0] else 1
    return LocalShard(local, int(offset[0]) * width if len(offset) else 0)


def published_rows(tensor: Tensor, rank: int) -> tuple[int, int] | None:
    """Returns the rows (first, end) of a tensor that `shard_of` gives this rank, None for none."""
    if not isinstance(tensor, DTensor):
        return (0, len(tensor)) if rank == 0 else None
    if tensor.device_mesh.get_coordinate() is None or not is_first_holder(tensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, _placements_by_rows(tensor)
    )
    return (int(offset[0]), int(offset[0]) + int(shape[0])) if shape[0] else None


def _rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _exchanged(tensor: DTensor, local: Tensor) -> DTensor:
    """Places a tensor, whose part here is ``local``, so that each rank holds some of its rows."""
    return placed_like(tensor, local).redistribute(placements=_placements_by_rows(tensor))


def _placements_by_rows(tensor: DTensor) -> Sequence[Placement]:
    """Returns placements that leave each rank some rows of a tensor."""
    if _by_rows(tensor):
        return tensor.placements
    return [one if isinstance(one, Replicate) else Shard(0) for one in tensor.placements]


def _by_rows(tensor: DTensor) -> bool:
    """Returns whether each rank holds consecutive rows.

    FSDP2 may shard tensors that another axis has already divided by rows, which torch calls
    strided. Parts are still consecutive if the other axis divides the rows evenly, as the trainer's
    does.
    """
    return all(
        isinstance(one, Replicate) or (isinstance(one, Shard | _StridedShard) and one.dim == 0)
        for one in tensor.placements
    )
