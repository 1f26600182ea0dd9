"""Checks how the trainer's ranks divide into axes."""

from __future__ import annotations


def layout_contradiction(
    ranks: int, *, replicate: int, tensor_parallel: int, expert_parallel: int
) -> tuple[str, str] | None:
    """Find a contradiction between a number of ranks and its axes: the reason and what to do."""
    if expert_parallel > 1:
        return (
            f"expert_parallel = {expert_parallel}: the trainer cannot divide experts over ranks",
            "set expert_parallel = 1; FSDP shards each expert's weights over all ranks",
        )
    if tensor_parallel > 1:
        return (
            f"tensor_parallel = {tensor_parallel}: the trainer cannot divide layers over ranks",
            "set tensor_parallel = 1; FSDP shards every layer's weights over all ranks",
        )
    if ranks % replicate:
        reason = f"{ranks} ranks do not divide into replicate = {replicate} copies"
        return reason, f"use a multiple of {replicate} ranks, or another train.replicate"
    return None
