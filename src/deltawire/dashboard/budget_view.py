"""Shows the decisions of a run's controller as a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltawire.dashboard.wording import controller_words, percent, setting_words
from deltawire.display import legible
from deltawire.events import Controlled


def budget_table(decisions: Sequence[Controlled], *, differ: Collection[int]) -> RenderableType:
    """One row a decision, and whether all of them follow from the run's evaluations."""
    table = Table("version", "accuracy", "tokens a version", "decision")
    for one in decisions:
        words = Text(legible(controller_words(one), 300), "bold" if one.moved else "dim")
        price = f"{sum(one.price.values()):,.0f}"
        table.add_row(f"{one.version:,}", percent(one.accuracy), price, words)
    if not decisions:
        return Text("no decision yet: the controller decides after each evaluation")
    last = f"now: {legible(setting_words(decisions[-1].after), 300)}"
    if differ:
        versions = ", ".join(map(str, sorted(differ)))
        verdict = Text(f"not what the evaluations give: the decisions of {versions}", "red")
    else:
        verdict = Text(f"all {len(decisions)} decisions follow from the run's evaluations", "green")
    return Group(table, Text(last), verdict)
