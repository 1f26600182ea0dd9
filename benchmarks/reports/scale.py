"""``deltawire bench scale``: costs that grow with ranks, readers, versions and workers."""

from __future__ import annotations

import argparse

from benchmarks.reports.key_table import run_keys
from benchmarks.scale.keys import KEYS, PACKAGE


def run(arguments: argparse.Namespace) -> int:
    """Measures the chosen keys and prints the table or the JSON."""
    return run_keys(arguments, KEYS, PACKAGE)
