"""``deltawire bench train``: figures of training steps, each against its floor."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from benchmarks.training.keys import Options, choose_keys, measure_in_processes, report, rows


def run(arguments: argparse.Namespace) -> int:
    """Measures the chosen keys and prints the table or the JSON."""
    options = Options.of(arguments)
    values, details = measure_in_processes(choose_keys(arguments.keys), options)
    if arguments.json:
        Console().print_json(json.dumps(report(values, details, options)))
        return 0
    table = Table("key", "value", "floor", "met", "meaning")
    for row in rows(values):
        table.add_row(*row, style=None if row[3] == "yes" else "red")
    Console(highlight=False).print(table)
    return 0
