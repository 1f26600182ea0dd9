"""Prints what moved a behavior: steps, layers, groups."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.display import legible
from deltawire.launch.branches.printing import SHOWN_GROUPS, print_line
from deltawire.launch.branches.why import Explanation

SHOWN_STEPS = 10
SHOWN_LAYERS = 8


def print_explanation(found: Explanation, console: Console) -> None:
    """Prints the steps, layers and groups that moved a behavior."""
    change = found.after - found.before
    print_line(
        console,
        f"{found.run}@{found.first}..{found.last}: {found.before:.5g} to {found.after:.5g}, "
        f"change {change:+.4g} ({found.unit})",
    )
    share = "" if found.residual_share is None else f" ({found.residual_share:.2%} of the change)"
    print_line(console, f"residual of the integral {found.residual:+.2g}{share}")
    table = Table("version", "part", "of the change", "measured", "without momentum")
    for step in sorted(found.parts, key=lambda one: -abs(one.part))[:SHOWN_STEPS]:
        name = str(step.version)
        if step.base != step.version - 1:
            name = f"{step.base + 1} to {step.version}"
        shown = _of(step.part, change)
        fresh = "" if step.fresh is None else f"{step.fresh:+.4g}"
        table.add_row(name, f"{step.part:+.4g}", shown, f"{step.change:+.4g}", fresh)
    console.print(table)
    layers = Table("layer", "part", "of the change")
    for layer, part in list(found.layers.items())[:SHOWN_LAYERS]:
        layers.add_row(Text(legible(layer, 80)), f"{part:+.4g}", _of(part, change))
    console.print(layers)
    _print_effects(found, console)


def _print_effects(found: Explanation, console: Console) -> None:
    for one in found.unexplained:
        print_line(console, f"version {one.version}: its groups are not examined: {one.reason}")
    inexact = sorted({one.version for one in found.groups if not one.exact})
    if inexact:
        shown = ", ".join(map(str, inexact))
        print_line(
            console, f"not exact: replay gives other bits for version {shown} on this machine"
        )
    if not found.groups:
        return
    table = Table("group", "version", "task", "rewards", "effect")
    for group in found.groups[:SHOWN_GROUPS]:
        table.add_row(
            Text(f"{legible(group.worker, 64)}/{group.sequence}"),
            str(group.version),
            Text(legible(group.task, 60)),
            " ".join(f"{value:g}" for value in group.rewards[:16]),
            f"{group.effect:+.4g}",
        )
    console.print(table)


def _of(part: float, change: float) -> str:
    return f"{part / change:+.1%}" if change else ""
