"""The table and the JSON of a benchmark that consists of keys with floors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from benchmarks.training.keys import (
    Key,
    Options,
    choose_keys,
    measure_in_processes,
    report,
    rows,
)


def run_keys(arguments: argparse.Namespace, keys: Mapping[str, Key], package: str) -> int:
    """Measures the chosen keys and prints the table or the JSON; returns the exit code.

    ``keys`` name modules of ``package``.
    """
    options = Options.of(arguments)
    names = choose_keys(arguments.keys, keys)
    values, details = measure_in_processes(names, options, keys=keys, package=package)
    if arguments.json:
        Console().print_json(json.dumps(report(values, details, options, keys=keys)))
        return 0
    table = Table("key", "value", "floor", "met", "meaning")
    for row in rows(values, keys=keys):
        table.add_row(*row, style=None if row[3] == "yes" else "red")
    Console(highlight=False).print(table)
    return 0
