"""Prints versions and their differences on a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.dashboard.wording import byte_size, figure
from deltawire.display import legible
from deltawire.launch.branches.description import StepGroup, VersionDescription
from deltawire.launch.branches.differences import BitDifference, ChangedPart

SHOWN_GROUPS = 20


def print_version(found: VersionDescription, console: Console) -> None:
    """Prints one version."""
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.created_at))
    print_line(console, f"{found.run}@{found.version}, {created} UTC, digest {found.digest[:16]}")
    if found.base is not None:
        print_line(console, f"delta from version {found.base}: {byte_size(found.delta_bytes)}")
    if found.anchor_bytes is not None:
        print_line(console, f"anchor: {byte_size(found.anchor_bytes)}")
    if found.step is not None:
        names = ("loss", "grad_norm", "k3", "clipped", "entropy", "tokens", "seconds")
        figures = ", ".join(f"{name} {figure(found.step[name])}" for name in names)
        print_line(console, f"step: {figures}")
    if found.learning_rate is not None:
        print_line(console, f"learning rate: {found.learning_rate:.3g}")
    if found.settings:
        changed = ", ".join(f"{key} = {value}" for key, value in sorted(found.settings.items()))
        print_line(console, f"settings that differ from run.json: {changed}")
    if found.heldout is not None:
        shown = found.heldout
        print_line(
            console,
            f"held-out: {shown['accuracy']:.3f} of {shown['problems']} problems, greedy "
            f"{shown['greedy']:.3f}",
        )
    _print_groups(found.groups, found.reward, console)
    if found.bits is None:
        print_line(console, f"bits are not compared: {found.unmeasured}")
    else:
        print_bits(found.bits, console)


def print_bits(found: BitDifference, console: Console) -> None:
    """Prints what differs between two versions."""
    print_line(
        console,
        f"changed: {found.changed} of {found.count} weights "
        f"({found.changed / max(1, found.count):.3%}), norm of the update {found.norm:.4g}",
    )
    if not found.changed:
        return
    console.print(_parts("layer", found.layers))
    console.print(_parts("kind", found.kinds))
    table = Table("largest movers", "changed", "norm", "of its values", "rank")
    for one in found.movers:
        table.add_row(
            Text(legible(one.name, 100)),
            f"{one.changed / max(1, one.count):.3%}",
            "" if one.norm is None else f"{one.norm:.4g}",
            "" if one.relative is None else f"{one.relative:.3%}",
            "" if one.rank is None else f"{one.rank:.1f}",
        )
    console.print(table)


def _parts(title: str, parts: Sequence[ChangedPart]) -> Table:
    table = Table(title, "weights", "changed", "share", "norm")
    for one in parts:
        share = f"{one.changed / max(1, one.count):.3%}"
        name = Text(legible(one.name, 80))
        table.add_row(name, str(one.count), str(one.changed), share, f"{one.norm:.4g}")
    return table


def _print_groups(groups: Sequence[StepGroup], reward: float | None, console: Console) -> None:
    if not groups:
        return
    mean = "" if reward is None else f", mean reward {reward:.4g}"
    faults = Counter(one.fault for one in groups if one.fault)
    print_line(console, f"groups: {len(groups)}{mean}")
    for fault, count in sorted(faults.items()):
        print_line(console, f"{count} not read: {fault}")
    table = Table("group", "task", "rewards", "tokens", "staleness")
    for one in groups[:SHOWN_GROUPS]:
        rewards = " ".join(f"{value:g}" for value in one.rewards[:16])
        table.add_row(
            Text(f"{legible(one.worker, 64)}/{one.sequence}"),
            Text(legible(one.task, 60)),
            rewards + (" …" if len(one.rewards) > 16 else ""),
            str(one.tokens),
            "" if one.staleness is None else str(one.staleness),
        )
    console.print(table)
    if len(groups) > SHOWN_GROUPS:
        print_line(console, f"{len(groups) - SHOWN_GROUPS} more groups: --json prints all")


def print_line(console: Console, text: str) -> None:
    """Prints one line, without what a bucket's text may do to a terminal."""
    console.print(Text(legible(text, 2000)))
