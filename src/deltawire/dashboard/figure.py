"""One row of the table of figures (`deltawire.dashboard.figures`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deltawire.dashboard.state import RunState
from deltawire.dashboard.wording import MISSING, byte_size, duration, milliseconds, percent
from deltawire.dashboard.wording import figure as significant

Unit = Literal["", "share", "bytes", "ms", "s", "versions", "1/min", "1/s", "nats"]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Figure:
    """A row of the table; ``of`` returns None where nothing was measured.

    ``metric`` and ``labels`` name the gauge, ``tracked`` the series of a tracker; a figure without
    one is not exported there. A dot in the name leads into a nested part of the status.

    Example::

        Figure("reward", "", "Mean reward of the newest step's groups", lambda state: ...)
    """

    name: str
    unit: Unit
    help: str
    of: Callable[[RunState], float | None]
    metric: str = ""
    labels: Labels = ()
    tracked: str = ""

    def text(self, value: float | None) -> str:
        """Writes a value for people, by the unit."""
        match self.unit:
            case _ if value is None:
                return MISSING
            case "share":
                return percent(value)
            case "bytes":
                return byte_size(value)
            case "ms":
                return milliseconds(value)
            case "s":
                return duration(value)
            case _ if isinstance(value, int):
                return f"{value:,}"
            case _:
                return significant(value)
