"""``deltawire bench rounding``: which part of an update reaches 16-, 8- and 4-bit weights."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from deltawire.errors import InputError


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints one row for each rate, step, start of the masters and format."""
    if min(arguments.steps) < 1 or arguments.matrices < 1:
        raise InputError("--steps and --matrices must be at least 1")
    if not all(0 < rate < 1 for rate in arguments.rates):
        raise InputError("--rates are learning rates, between 0 and 1")
    from benchmarks.rounding import measure

    found = measure(
        Path(arguments.model),
        rates=arguments.rates,
        steps=arguments.steps,
        matrices=arguments.matrices,
        seed=arguments.seed,
    )
    if arguments.json:
        Console().print_json(msgspec.json.encode(found).decode())
        return 0
    table = Table("rate", "steps", "masters", "format", "moved by", "served", "cosine", "changed")
    for one in found:
        table.add_row(
            f"{one.rate:g}",
            str(one.step),
            one.masters,
            one.format,
            f"{one.moved:.2g}",
            f"{one.served:.3f}",
            f"{one.cosine:.3f}",
            f"{one.changed:.2%}",
        )
    Console(highlight=False).print(table)
    return 0
