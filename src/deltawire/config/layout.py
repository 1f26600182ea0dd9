"""Checks how the trainer's ranks divide into axes."""

from __future__ import annotations


def layout_contradiction(
    ranks: int, *, replicate: int, tensor_parallel: int, expert_parallel: int
) -> tuple[str, str] | None:
    """Finds a contradiction between a number of ranks and its axes: the reason and what to do."""
    if ranks % (replicate * tensor_parallel):
        parts = [f"replicate = {replicate} copies"] if replicate > 1 else []
        parts += [f"tensor_parallel = {tensor_parallel}"] if tensor_parallel > 1 else []
        step = replicate * tensor_parallel
        keys = "train.replicate" if tensor_parallel == 1 else "train.tensor_parallel"
        return (
            f"{ranks} ranks do not divide into {' and '.join(parts)}",
            f"use a multiple of {step} ranks, or another {keys}",
        )
    shards = ranks // (replicate * tensor_parallel)
    if shards % expert_parallel:
        reason = (
            f"expert_parallel = {expert_parallel} does not divide the {shards} ranks that shard "
            "one copy of the weights"
        )
        return reason, (
            f"use a divisor of {shards}, which is ranks / (replicate * tensor_parallel), "
            "or other ranks"
        )
    return None
