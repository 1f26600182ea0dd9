"""Describes how a model is laid out over ranks, and which parts of a step are recomputed, packed or
offloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from deltawire.errors import InputError
from deltawire.plan.architecture import Attention, Model

Mode = Literal["full", "lora", "reference"]
Checkpointing = Literal["none", "selective", "full", "offloaded"]
Offload = Literal["none", "optimizer", "all"]
Packing = str
"""``none``, or the name of a packed format in plans (`deltawire.packed_formats`)."""
Optimizer = Literal["adamw", "muon"]

MODES: tuple[Mode, ...] = get_args(Mode)
POLICIES: tuple[Checkpointing, ...] = get_args(Checkpointing)


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """One way to run a training step. The number of ranks is the product of the axes.

    Experts are spread over ``expert`` ranks of those that also shard the rest of the model
    (``data`` times ``context_parallel``), so ``expert`` adds no ranks.
    """

    mode: Mode = "full"
    data: int = 1
    """Ranks that one copy of the parameters is sharded over (FSDP2)."""
    replicate: int = 1
    """Copies of the sharded model (HSDP)."""
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    context_parallel: int = 1
    context: int = 4096
    """Tokens per sequence."""
    sequences: int = 1
    """Sequences per micro-batch and data rank."""
    accumulate: bool = False
    """More than one micro-batch per step: gradients exist from the start."""
    checkpointing: Checkpointing = "full"
    offload: Offload = "none"
    optimizer: Optimizer = "adamw"
    packing: Packing = "none"
    """The packed format of frozen routed experts."""
    lora_rank: int = 0
    lora_experts: bool = False
    """Every expert's matrices have adapters too."""
    chunk: int = 1024
    """Tokens that pass the head at once; 0 for all."""
    imbalance: float = 1.0
    """Tokens of the most loaded expert rank over the mean; 1 without expert parallelism."""

    @property
    def ranks(self) -> int:
        """Accelerators of the layout."""
        return self.shards * self.replicate * self.tensor * self.pipeline

    @property
    def shards(self) -> int:
        """Ranks that hold different parts of the same parameters."""
        return self.data * self.context_parallel

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch on one rank."""
        return -(-self.context * self.sequences // self.context_parallel)


def check_layout(model: Model, layout: TrainingLayout) -> None:
    """Raises `InputError` if the layout contradicts itself or does not divide the model."""
    axes = ("data", "replicate", "tensor", "expert", "pipeline", "context_parallel")
    for name in (*axes, "context", "sequences"):
        if getattr(layout, name) < 1:
            raise InputError(f"{name} must be at least 1, not {getattr(layout, name)}")
    if layout.shards % layout.expert:
        raise InputError(
            f"expert {layout.expert} does not divide data x context_parallel = {layout.shards}"
        )
    for layer, _ in model.kinds:
        experts = layer.feed_forward.experts
        if experts and experts % layout.expert:
            raise InputError(
                f"expert {layout.expert} does not divide {model.name}'s {experts} experts"
            )
        _check_heads(model.name, layer.attention, layout.tensor)
    if layout.expert > 1 and not model.expert_parameters:
        raise InputError(f"{model.name} has no experts to spread over {layout.expert} ranks")
    if layout.pipeline > len(model.layers):
        raise InputError(f"{layout.pipeline} stages for {model.name}'s {len(model.layers)} layers")
    if (layout.mode == "lora") != (layout.lora_rank > 0):
        raise InputError("lora_rank belongs to mode lora, and mode lora needs one")
    if layout.packing != "none" and (layout.mode == "full" or not model.expert_parameters):
        raise InputError(
            f"packing {layout.packing} is for frozen experts: use mode lora or reference, "
            f"and a model with experts"
        )
    if layout.offload != "none" and layout.mode != "full":
        raise InputError(
            f"offload {layout.offload} is for full training: mode {layout.mode} has no large state",
            hint="checkpointing offloaded moves activations",
        )
    if layout.imbalance < 1:
        raise InputError(
            f"imbalance is the most loaded over the mean, at least 1: {layout.imbalance}"
        )


def _check_heads(name: str, attention: Attention, tensor: int) -> None:
    """Raises `InputError` unless tensor parallelism divides whole heads, as the trainer does."""
    for count, kind in ((attention.heads, "heads"), (attention.key_value_heads, "key/value heads")):
        if count % tensor:
            raise InputError(
                f"tensor {tensor} does not divide {name}'s {count} {kind}",
                hint="use a divisor of both, or shard over more data ranks instead",
            )
