"""``deltawire bench deltas``: real pairs of weights to measure the codec on."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from deltawire.errors import InputError
from deltawire.launch.processes import read_config


def run(arguments: argparse.Namespace) -> int:
    """Records every missing pair; a second call continues where the first stopped."""
    config = read_config(Path(arguments.config), seed=arguments.seed)
    if min(arguments.strides) < 1 or arguments.settle < 0:
        raise InputError("--strides must be at least 1 and --settle at least 0")
    if not all(0 < rate < 1 for rate in arguments.rates):
        raise InputError("--rates are learning rates, between 0 and 1")
    from benchmarks.recording import Setting, record

    console = Console(stderr=True, highlight=False)
    for rate in arguments.rates:
        setting = Setting(arguments.kind, rate, tuple(arguments.strides), arguments.settle)
        for pair in record(config, setting, Path(arguments.out), console.print):
            print(f"{pair.path}\t{pair.density:.6f}")  # noqa: T201
    return 0
