"""Section of the adapter that is trained instead of the whole model."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deltawire.config.base import Fraction, Positive, Section


class AdapterConfig(Section, frozen=True, kw_only=True):
    """The part of the model that is trained: all of it, or a LoRA adapter over the frozen rest."""

    kind: Literal["none", "lora"] = "none"
    rank: Annotated[int, Meta(ge=1, le=4096)] = 16
    alpha: Positive = 32.0
    """The adapter's product is scaled by alpha / rank."""
    targets: list[Annotated[str, Meta(min_length=1, max_length=256)]] = msgspec.field(
        default_factory=lambda: ["all-linear"]
    )
    """Last parts of the names of linear layers, such as ``q_proj``; ``all-linear`` is every linear
    layer except the head. ``experts`` is every stack of fused experts, and ``gate_up_proj`` or
    ``down_proj`` names one kind; stacks need `packed`."""
    dropout: Fraction = 0.0
    """Of the adapter's input; needs ``train.dropout``."""
    packed: Literal["none", "int4-g32", "int8-row", "mxfp4", "nvfp4", "fp8-block"] = "none"
    """The format that frozen experts are kept in, by trainer and sampler."""
    packed_layers: list[Annotated[str, Meta(min_length=1, max_length=256)]] = []
    """Linear layers that are packed too, named as in `targets`."""
    shared_factor: bool = False
    """If true, the experts of a layer share the factor on its outside: A of ``gate_up_proj``, B of
    ``down_proj``."""
