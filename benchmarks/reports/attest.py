"""``deltawire bench attest``: bugs that are named, false alarms, and what attestation costs."""

from __future__ import annotations

import argparse

from benchmarks.attest.keys import KEYS, PACKAGE
from benchmarks.reports.key_table import run_keys


def run(arguments: argparse.Namespace) -> int:
    """Measures the chosen keys and prints the table or the JSON."""
    return run_keys(arguments, KEYS, PACKAGE)
