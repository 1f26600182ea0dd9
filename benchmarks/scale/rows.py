"""Rows of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row with the median time, the slower of two in the middle."""
    return sorted(rows, key=lambda row: float(row["seconds"]))[len(rows) // 2]
