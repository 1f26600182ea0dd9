"""Clips gradients by their norm over all parameters and all ranks, on any mesh."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deltawire.export.shards import is_first_holder
from deltawire.train.parallel.mesh import TrainerMesh


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, mesh: TrainerMesh) -> float:
    """Scales gradients in place so that their norm is at most ``max_norm``; returns the norm
    before that, in float32 precision, the same on every rank.

    Each element counts once: a replicated part by its first holder. torch's own function stacks
    norms of DTensors, which fails for parameters on different meshes; here only sums of squares are
    combined, in float64. On one rank this is `torch.nn.utils.clip_grad_norm_` to the bit.
    """
    gradients = [one.grad for one in parameters if one.grad is not None]
    locals_ = [_local(one) for one in gradients]
    norms = [torch.linalg.vector_norm(one) for one in locals_]
    squares = torch.zeros(len(norms), dtype=torch.float64)
    if norms:
        squares = torch.stack([norm.to(mesh.device) for norm in norms]).cpu().double().square()
    counted = torch.tensor([_counts(one, mesh) for one in gradients], dtype=torch.float64)
    # The square of a float32 is exact in float64, and so is its root: one rank loses nothing.
    total = torch.linalg.vector_norm(mesh.sum(squares * counted).sqrt().float())
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for one in locals_:
        one.mul_(scale.to(one.device))
    return float(total)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _counts(tensor: Tensor, mesh: TrainerMesh) -> bool:
    return is_first_holder(tensor) if isinstance(tensor, DTensor) else mesh.leads
