"""``deltawire bench train``: figures of training steps, each against its floor."""

from __future__ import annotations

import argparse

from benchmarks.reports.key_table import run_keys
from benchmarks.training.keys import KEYS, PACKAGE


def run(arguments: argparse.Namespace) -> int:
    """Measures the chosen keys and prints the table or the JSON."""
    return run_keys(arguments, KEYS, PACKAGE)
