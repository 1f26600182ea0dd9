"""``deltawire bench``: the benchmarks, which are part of a checkout and not of the wheel."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from deltawire.errors import InputError

CHECKOUT = Path(__file__).resolve().parents[3]
"""The repository's root, if this file lies in a checkout."""


class _BenchParser(argparse.ArgumentParser):
    """Loads the benchmarks' own arguments at the first use, so that other commands do not."""

    loaded = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self.loaded:
            self.loaded = True
            benches = self.add_subparsers(
                dest="benchmark",
                metavar="WHAT",
                required=True,
                parser_class=argparse.ArgumentParser,
            )
            benchmark_commands().add_parsers(benches)
        return super().parse_known_args(args, namespace)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares ``deltawire bench``."""
    usual, commands._parser_class = commands._parser_class, _BenchParser
    try:
        parser = commands.add_parser("bench", help="run a benchmark (needs a checkout)")
    finally:
        commands._parser_class = usual
    parser.set_defaults(call=run)


def benchmark_commands(root: Path = CHECKOUT) -> Any:
    """Imports the module that declares the benchmarks.

    Raises `InputError` where ``root`` holds none, such as in an installed wheel.
    """
    if not (root / "benchmarks" / "commands.py").is_file():
        raise InputError(
            "deltawire bench needs a checkout of the repository: the wheel has no benchmarks",
            hint="clone the repository, run make setup, and use its .venv/bin/deltawire",
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module("benchmarks.commands")


def run(arguments: argparse.Namespace) -> int:
    """Runs one benchmark; returns its exit code."""
    return int(benchmark_commands().run(arguments))
