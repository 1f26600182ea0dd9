"""``deltawire bench branches``: figures of the tools over versions, each with its floor."""

from __future__ import annotations

import argparse

from benchmarks.branches.keys import KEYS, PACKAGE
from benchmarks.reports.key_table import run_keys


def run(arguments: argparse.Namespace) -> int:
    """Measures the chosen keys and prints the table or the JSON."""
    return run_keys(arguments, KEYS, PACKAGE)
