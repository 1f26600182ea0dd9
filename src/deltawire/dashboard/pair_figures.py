"""Figures of runs that train on pairs of a served and a better answer."""

from __future__ import annotations

from typing import Final

from deltawire.dashboard.figure import Figure
from deltawire.dashboard.state import RunState


def _newest(state: RunState) -> int | None:
    return state.steps[max(state.steps)].pairs if state.steps else None


def _total(state: RunState) -> int | None:
    """All pairs; None in a run that does not train on them."""
    counts = [step.pairs for step in state.steps.values() if step.pairs is not None]
    return sum(counts) if counts else None


PAIR_FIGURES: Final = (
    Figure(
        "pairs",
        "",
        "Pairs of a served and a better answer, newest step",
        _newest,
        metric="preference_pairs",
        tracked="pairs",
    ),
    Figure("pairs_total", "", "Pairs of a served and a better answer that were trained on", _total),
)
