"""``deltawire bench budget``: figures of where compute goes, each with its floor."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from benchmarks.budget.keys import KEYS, PACKAGE
from benchmarks.training.keys import Options, choose_keys, measure_in_processes, report, rows


def run(arguments: argparse.Namespace) -> int:
    """Measure the chosen keys and print the table or the JSON."""
    options = Options.of(arguments)
    names = choose_keys(arguments.keys, KEYS)
    values, details = measure_in_processes(names, options, keys=KEYS, package=PACKAGE)
    if arguments.json:
        Console().print_json(json.dumps(report(values, details, options, keys=KEYS)))
        return 0
    table = Table("key", "value", "floor", "met", "meaning")
    for row in rows(values, keys=KEYS):
        table.add_row(*row, style=None if row[3] == "yes" else "red")
    Console(highlight=False).print(table)
    return 0
