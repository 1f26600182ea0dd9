"""Tables of a plan, of --what-if and of a simulation, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from deltawire.plan.fleet.planner import FleetPlan, RegionPlan
from deltawire.plan.fleet.what_if import WhatIfRow

if TYPE_CHECKING:
    from deltawire.plan.fleet.simulation.fleet import SimulatedFleet

_SCALES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


def bytes_text(size: float) -> str:
    """Writes bytes with three digits and a decimal unit."""
    for scale, unit in _SCALES:
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """Writes seconds with three digits, or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def plan_view(plan: FleetPlan) -> RenderableType:
    """Lays a plan out: the summary, each region's hops and figures, other methods."""
    head = Table(title=plan.name, show_header=False, title_justify="left")
    for row in _summary(plan):
        head.add_row(*row)
    parts: list[RenderableType] = [head]
    shown: set[str] = set()
    for region in plan.regions:
        alike = _like(region)
        if alike in shown:
            continue
        shown.add(alike)
        names = ", ".join(other.name for other in plan.regions if _like(other) == alike)
        parts.append(_hops(region, names))
        parts.append(_methods(region, plan, names))
    parts += [_regions(plan), _costs(plan)]
    parts += [f"[yellow]{escape(one)}[/yellow]" for one in plan.warnings]
    return Group(*parts)


def _costs(plan: FleetPlan) -> Table:
    """Lays out the items of a day, of all regions together."""
    table = Table(title="a day", title_justify="left")
    table.add_column("item")
    for name in ("reads", "writes, listings", "kept", "crosses", "$"):
        table.add_column(name, justify="right")
    for item in dict.fromkeys(one.item for one in plan.costs):
        lines = [one for one in plan.costs if one.item == item]
        table.add_row(
            item,
            f"{sum(one.reads for one in lines):,.0f}",
            f"{sum(one.writes for one in lines):,.0f}",
            bytes_text(sum(one.kept_bytes for one in lines)),
            bytes_text(sum(one.crossing_bytes for one in lines)),
            f"{sum(one.dollars for one in lines):,.2f}",
        )
    return table


def _like(region: RegionPlan) -> str:
    """Regions whose hops are equal have equal texts, and are shown together."""
    return repr([(hop.hop, f"{hop.seconds:.4g}", f"{hop.bytes:.4g}") for hop in region.hops])


def _summary(plan: FleetPlan) -> list[tuple[str, str]]:
    ratio = plan.rollout_ratio
    side = "the trainer binds" if ratio >= 1 else "rollouts bind: steps take longer than asked for"
    bound = "within" if plan.staleness_mean <= plan.max_staleness else "ABOVE"
    version = (
        f"{bytes_text(plan.delta_bytes)} of {bytes_text(plan.model_bytes)}, "
        f"{plan.delta_share:.2%}; {plan.changed:.3%} of the values change, "
        f"{plan.bits_per_change:.2f} bits each"
    )
    stale = (
        f"{plan.staleness_mean:.2f} versions: rollouts {plan.staleness_rollout:.2f}, queue "
        f"{plan.staleness_queue:.2f}, transfer {plan.staleness_transfer:.2f}; {bound} the bound "
        f"of {plan.max_staleness}"
    )
    step = (
        f"{seconds_text(plan.period_s)}, {plan.versions_a_day:.0f} a day; {side} (rollouts made "
        f"over consumed: {ratio:.2f})"
    )
    cost = (
        f"${plan.dollars_a_day:,.2f} with {plan.kept_days:g} days kept; deltas "
        f"${plan.version_dollars_a_day:,.2f}, as whole checkpoints ${plan.whole_dollars_a_day:,.2f}"
    )
    rows = [
        ("model", f"{plan.model}, {plan.parameters:,} values as {plan.precision}"),
        ("version", version),
        ("to the last reader", f"{seconds_text(plan.seconds)}; {plan.binding} takes longest"),
        ("the trainer waits", seconds_text(plan.trainer_blocked_s)),
        ("mean staleness", stale),
        ("step", step),
        ("engines", f"{plan.engines}; {plan.engines_needed} keep the trainer busy"),
        ("a day", cost),
        ("trainer's host", f"{bytes_text(plan.trainer_host_bytes_per_rank)} a rank"),
        ("rates", plan.rates),
    ]
    if plan.proof_bytes:
        rows.append(("kept for proofs", f"about {bytes_text(plan.proof_bytes)}, and versions"))
    if plan.accelerator_dollars_a_day is not None:
        dollars = f"{plan.accelerators}, ${plan.accelerator_dollars_a_day:,.0f} a day"
        rows.append(("accelerators", dollars))
    return rows


def _hops(region: RegionPlan, names: str) -> Table:
    table = Table(title=f"hops to {names}", title_justify="left")
    table.add_column("hop")
    for name in ("time", "bytes, all", "requests, all"):
        table.add_column(name, justify="right")
    for hop in region.hops:
        binds = hop.hop == region.binding
        table.add_row(
            hop.hop,
            seconds_text(hop.seconds),
            bytes_text(hop.bytes) if hop.bytes else "",
            f"{hop.requests:,.0f}" if hop.requests else "",
            style="bold" if binds else None,
        )
    saved = sum(hop.seconds for hop in region.hops) - region.seconds
    table.add_row("overlap", f"-{seconds_text(saved)}", "", "")
    table.add_row("total", seconds_text(region.seconds), "", "", style="bold")
    return table


def _methods(region: RegionPlan, plan: FleetPlan, names: str) -> Table:
    table = Table(title=f"with other methods, to {names} (least times)", title_justify="left")
    table.add_column("method")
    for name in ("bytes a version", "time", "$ a day and region"):
        table.add_column(name, justify="right")
    table.add_row(
        "deltawire", bytes_text(plan.delta_bytes), seconds_text(region.seconds),
        f"{region.version_dollars_a_day:,.2f}", style="bold",
    )  # fmt: skip
    for one in region.methods:
        table.add_row(
            one.method,
            bytes_text(one.bytes),
            seconds_text(one.seconds),
            f"{one.dollars_a_day:,.2f}",
        )
    return table


def _regions(plan: FleetPlan) -> Table:
    table = Table(title="regions", title_justify="left")
    table.add_column("")
    for region in plan.regions:
        table.add_column(region.name, justify="right")

    def row(name: str, values: Iterable[str]) -> None:
        table.add_row(name, *values)

    regions = plan.regions
    row("to the last reader", (seconds_text(one.seconds) for one in regions))
    if any(one.goal_met is not None for one in regions):
        row("goal", ("met" if one.goal_met else "MISSED" for one in regions))
        row("rate a reader needs for it", map(_needed, regions))
    row("keeps up", ("yes" if one.keeps_up else "NO" for one in regions))
    row("mean staleness, versions", (f"{one.staleness_mean:.2f}" for one in regions))
    row("a reader gets", (bytes_text(one.reader_bytes) for one in regions))
    row("reads, of the store's limit", (f"{one.reads_share:.0%}" for one in regions))
    row("polls, of the store's limit", (f"{one.polls_share:.1%}" for one in regions))
    row("host memory a rank", (
        bytes_text(one.host_bytes_per_rank) + ("" if one.host_fits else " TOO LARGE")
        for one in regions
    ))  # fmt: skip
    row("device memory a rank", (bytes_text(one.device_bytes_per_rank) for one in regions))
    row("readers get a day", (bytes_text(one.bytes_a_day) for one in regions))
    row("crosses a day", (bytes_text(one.crossing_bytes_a_day) for one in regions))
    row("cold start of all, at least", (seconds_text(one.cold.seconds) for one in regions))
    row("requests of a cold start", (f"{one.cold.requests:,.0f}" for one in regions))
    row("a late joiner, at least", (seconds_text(one.cold.late_joiner_s) for one in regions))
    row("relay's host memory", (
        bytes_text(one.relay_host_bytes) if one.relay_host_bytes else "" for one in regions
    ))  # fmt: skip
    row("$ a day", (f"{one.dollars_a_day:,.2f}" for one in regions))
    row("whole checkpoints: a day", (bytes_text(one.whole_bytes_a_day) for one in regions))
    row("whole checkpoints: $ a day", (f"{one.whole_dollars_a_day:,.2f}" for one in regions))
    return table


def _needed(region: RegionPlan) -> str:
    if region.needed_bytes_s is None:
        return "none is enough"
    return f"{bytes_text(region.needed_bytes_s)}/s"


def simulation_view(plan: FleetPlan, found: SimulatedFleet) -> Table:
    """Lays a simulation out next to the closed form."""
    table = Table("", title=f"{plan.name}: {found.steps} steps simulated", title_justify="left")
    table.add_column("closed form", justify="right")
    table.add_column("simulated", justify="right")
    for region in plan.regions:
        simulated = found.mean_reader_s[region.name]
        row = (seconds_text(region.seconds), seconds_text(simulated))
        table.add_row(f"to the last reader of {region.name}", *row)
    table.add_row("a step", seconds_text(plan.period_s), seconds_text(found.period_s))
    table.add_row("mean staleness", f"{plan.staleness_mean:.2f}", f"{found.staleness_mean:.2f}")
    table.add_row("largest staleness", f"bound {plan.max_staleness}", str(found.staleness_max))
    table.add_row("the trainer waits for rollouts", "", f"{found.idle_share:.1%}")
    table.add_row(
        "rollouts",
        "",
        f"{found.granted:,} granted, {found.trained:,} trained on, {found.evicted:,} evicted, "
        f"{found.lost:,} lost with an engine and granted again, {found.outstanding:,} outstanding",
    )
    table.add_row("engines that died", "", str(found.deaths))
    return table


def what_if_view(rows: Sequence[WhatIfRow]) -> Table:
    """Lays out a row for each combination of --what-if."""
    table = Table(*rows[0].keys)
    for name in ("a version", "reader", "longest hop", "staleness", "$ a day", "engines"):
        table.add_column(name, justify="right")
    table.caption = "reader: time to the last one; engines: how many keep the trainer busy"
    for row in rows:
        table.add_row(
            *row.keys.values(),
            bytes_text(row.delta_bytes),
            seconds_text(row.seconds),
            row.binding,
            f"{row.staleness_mean:.2f}",
            f"{row.dollars_a_day:,.2f}",
            str(row.engines_needed),
        )
    return table
