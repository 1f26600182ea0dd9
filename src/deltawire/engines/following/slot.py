"""Defines the adapter slot that `RankWeights` fills; an engine without slots has none."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deltawire.placement.placed import PlacedWeights
from deltawire.placement.placement import LoadWeights, Placement


class Slot(Protocol):
    """The place of a run's adapter in an engine."""

    @property
    def has_head(self) -> bool:
        """True if the adapter changes the model's head."""
        ...

    def live(self) -> dict[str, Tensor]:
        """Returns the tensors that hold the adapter, by name."""
        ...

    def loader(self, load_base: LoadWeights) -> LoadWeights:
        """Returns a loader of weights and adapter, from one of the weights."""
        ...

    def scaled(self, placement: Placement) -> Placement:
        """Returns the placement with the adapter's factors."""
        ...

    def refuse_dropped(self, placements: list[Placement]) -> None:
        """Raises `InputError` if no rank serves some part of the adapter."""
        ...

    def clear(self) -> None:
        """Sets the padding of the slot to zero."""
        ...

    def check_padding(self, placed: PlacedWeights) -> None:
        """Raises `CorruptError` unless the padding is zero."""
        ...
