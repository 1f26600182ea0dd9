"""Cells: one stored result for each arm and seed, so that a benchmark of hours can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

SEEDS = range(5)


class Cells:
    """Results as ``FOLDER/NAME-seedN.json``; a stored cell is not measured again.

    Example::

        cells = Cells(Path("runs/bench-budget"))
        cells.measure("fixed", 0, lambda: {"tokens": 12})
        cells.all("fixed")   # None until every seed of SEEDS is there
    """

    def __init__(self, folder: Path, *, seeds: range = SEEDS) -> None:
        self.folder, self.seeds = folder, seeds

    def path(self, name: str, seed: int) -> Path:
        """The file of a cell."""
        return self.folder / f"{name}-seed{seed}.json"

    def read(self, name: str, seed: int) -> dict[str, Any] | None:
        """Returns a stored cell, None if it was not measured or cannot be read."""
        try:
            found: dict[str, Any] = json.loads(self.path(name, seed).read_text())
        except (OSError, ValueError):
            return None
        return found

    def measure(self, name: str, seed: int, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns a stored cell, or measures and stores it in one piece."""
        found = self.read(name, seed)
        if found is None:
            found = call()
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.path(name, seed).with_suffix(".partial")
            partial.write_text(json.dumps(found))
            partial.replace(self.path(name, seed))
        return found

    def all(self, name: str) -> list[dict[str, Any]] | None:
        """Returns the cells of every seed, None if one is missing: never fewer."""
        found = [self.read(name, seed) for seed in self.seeds]
        return None if None in found else [one for one in found if one is not None]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Returns the mean and its standard error, 0 for a single value."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return fmean(values), error
