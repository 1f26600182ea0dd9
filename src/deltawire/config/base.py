"""Defines the base of all sections, and the number types that they share."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
OwnDevice = Annotated[str, Meta(pattern=r"^(|auto|cpu|mps|cuda(:[0-9]{1,3})?)\Z")]
ExporterName = Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,64}\Z")]


class Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A table of the file."""
