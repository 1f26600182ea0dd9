"""Converts a measured batch to an event of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from deltawire import events
from deltawire.parity.divergence import Divergence
from deltawire.parity.gate import BatchParity

MAX_NAMED = 64
"""The most masked sequences named in one event, to keep its line short."""

_LARGEST = 1.7976931348623157e308


def finite(value: float) -> float:
    """Returns the nearest number that JSON can represent; NaN becomes the largest double."""
    return min(max(value, -_LARGEST), _LARGEST) if value == value else _LARGEST  # noqa: PLR0124


def parity_event(
    parity: BatchParity, *, process: str, at: float, version: int, names: Sequence[str]
) -> events.Parity:
    """Returns the event of the batch that made ``version``; ``names`` are its sequences' names."""
    return events.Parity(
        process=process,
        at=at,
        version=version,
        numeric=_gaps(parity.numeric),
        numeric_version=parity.numeric_version,
        drift=_gaps(parity.drift),
        flipped=[*parity.flipped_L],
        warnings=[str(crossing) for crossing in parity.warnings],
        masked=[names[row] for row in parity.masked[:MAX_NAMED]],
        stopped=[str(crossing) for crossing in parity.stopped],
    )


def _gaps(measured: Divergence) -> events.Gaps:
    values = asdict(measured)
    count = values.pop("tokens")
    return events.Gaps(tokens=count, **{name: finite(value) for name, value in values.items()})
