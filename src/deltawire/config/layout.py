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
    axes = replicate * tensor_parallel
    if ranks % axes:
        reason = (
            f"{ranks} ranks do not divide into replicate × tensor_parallel = "
            f"{replicate} × {tensor_parallel}"
        )
        return reason, f"use a multiple of {axes} ranks, or other axes"
    return None
