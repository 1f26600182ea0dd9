"""Muon: momentum, orthogonalized by Newton-Schulz iterations, one matrix at a time.

Source: Keller Jordan et al., "Muon", 2024, and `torch.optim.Muon`, whose step this is to the bit
for one matrix. That class does not support stacks of matrices or sharded ones; here a stack (E,
out, in) is E matrices, and a matrix that is sharded over ranks is gathered for its iterations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from deltawire.export.shards import box_of, local_part, placed_like

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPSILON = 1e-7


def orthogonalize(update: Tensor) -> Tensor:
    """Returns the nearest semi-orthogonal matrix, roughly: singular values within 0.7 to 1.2.

    ``update`` is [out, in], or a stack [E, out, in] of separate matrices; the result is bf16.
    """
    a, b, c = COEFFICIENTS
    tall = update.shape[-2] > update.shape[-1]
    x = update.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        if x.ndim == 2:
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        else:
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def scaled_rate(rate: float, shape: torch.Size, scale: str) -> float:
    """Returns the rate for one matrix: ``match_rms_adamw`` makes updates as large as AdamW's (Liu
    et al. 2025, eq. 4: 0.2·√max(out, in)), ``original`` is √max(1, out/in).
    """
    rows, columns = shape[-2:]
    if scale == "original":
        return rate * math.sqrt(max(1, rows / columns))
    return rate * 0.2 * math.sqrt(max(rows, columns))


def muon_step(
    master: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    rate: float,
    weight_decay: float,
    beta: float,
    scale: str,
) -> None:
    """Moves ``master`` in place, and its ``momentum``, which holds this rank's elements only.

    ``master`` and ``gradient`` are of one layout: plain, or DTensors of the same placements. All
    ranks of a sharded matrix must call this together.
    """
    local, local_gradient = local_part(master), local_part(gradient)
    momentum.lerp_(local_gradient, 1 - beta)
    direction = _orthogonal_shard(local_gradient.lerp(momentum, beta), master)
    local.mul_(1 - rate * weight_decay)
    local.add_(direction, alpha=-scaled_rate(rate, master.shape, scale))


def _orthogonal_shard(update: Tensor, like: Tensor) -> Tensor:
    """Orthogonalizes this rank's ``update``, gathered first where a rank holds no whole
    matrices.
    """
    if not isinstance(like, DTensor) or _holds_whole_matrices(like):
        return orthogonalize(update) if update.numel() else update
    whole = orthogonalize(placed_like(like, update).full_tensor())
    # Every rank has the whole matrix: its part is a slice, however meshes divide it.
    for dim, (size, start) in enumerate(zip(*box_of(like), strict=True)):
        whole = whole.narrow(dim, start if size else 0, size)
    return whole


def _holds_whole_matrices(tensor: DTensor) -> bool:
    """Returns True if each rank's part is whole matrices: a stack that is sharded over its experts
    only."""
    return all(
        isinstance(one, Replicate)
        or (tensor.ndim == 3 and isinstance(one, Shard | _StridedShard) and one.dim == 0)
        for one in tensor.placements
    )
