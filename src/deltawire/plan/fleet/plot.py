"""Draws a plan: the hops to each region as bars, or the times of --what-if as lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltawire.errors import InputError
from deltawire.plan.fleet.planner import FleetPlan
from deltawire.plan.fleet.what_if import WhatIfRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "copy": "#9ecae1", "quantise": "#6baed6", "encode": "#3182bd", "put": "#08519c",
    "commit": "#bdbdbd", "poll": "#d9d9d9", "get": "#31a354", "decode": "#fdae6b",
    "stage": "#e6550d", "swap": "#a63603", "move": "#fdd0a2",
}  # fmt: skip
SUFFIXES = (".svg", ".png", ".pdf")


def draw_plan(plan: FleetPlan, path: Path) -> None:
    """Draws a bar for each region; raises `InputError` without matplotlib or a known suffix."""
    figure, axes = _figure(path, height=1.6 + 0.5 * len(plan.regions))
    seen: set[str] = set()
    for row, region in enumerate(plan.regions):
        left = 0.0
        # Overlapped hops are shortened in proportion, so that a bar ends at the region's time.
        scale = region.seconds / sum(hop.seconds for hop in region.hops)
        for hop in region.hops:
            name = hop.hop.removeprefix("relay ")
            axes.barh(
                row, hop.seconds * scale, left=left, color=COLORS[name], edgecolor="white",
                linewidth=0.4, label=None if name in seen else name,
                hatch="//" if hop.hop.startswith("relay") else None,
            )  # fmt: skip
            seen.add(name)
            left += hop.seconds * scale
        axes.text(left, row, f" {region.seconds:.1f} s", va="center", fontsize=9)
    axes.set_yticks(range(len(plan.regions)), [region.name for region in plan.regions])
    axes.invert_yaxis()
    axes.set_xlabel("seconds to the last reader (hatched: the relay)")
    axes.set_title(f"{plan.name}: {plan.delta_bytes / 1e9:.2f} GB a version", fontsize=10)
    axes.margins(x=0.12)
    axes.legend(ncols=6, fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.28))
    figure.savefig(path, bbox_inches="tight", dpi=150)


def draw_what_if(rows: Sequence[WhatIfRow], path: Path) -> None:
    """Draws times and staleness over the first key's values; raises as `draw_plan`."""
    figure, axes = _figure(path, height=3.2)
    names = [", ".join(row.keys.values()) for row in rows]
    axes.plot(names, [row.seconds for row in rows], marker="o", color="#3182bd")
    axes.set_xlabel(", ".join(rows[0].keys))
    axes.set_ylabel("seconds to the last reader", color="#3182bd")
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="x", rotation=30 if len(names) > 8 else 0)
    other = axes.twinx()
    other.plot(names, [row.staleness_mean for row in rows], marker="s", color="#e6550d")
    other.set_ylabel("mean staleness, versions", color="#e6550d")
    other.set_ylim(bottom=0)
    for side in ("top",):
        other.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", dpi=150)


def _figure(path: Path, *, height: float) -> tuple[Any, Axes]:
    if path.suffix not in SUFFIXES:
        raise InputError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib", hint="pip install 'deltawire[plan]'") from None
    figure = Figure(figsize=(8, height))
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
