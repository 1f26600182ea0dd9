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
    layer except the head."""
    dropout: Fraction = 0.0
    """Of the adapter's input; needs ``train.dropout``."""
