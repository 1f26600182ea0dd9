"""``deltawire merge``: a version with its adapter merged, as a plain model."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import (
    add_json,
    add_run_url,
    add_trust,
    at_least,
    share,
    split_version,
    trust_of,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("merge", help="write a version with its adapter merged")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument("directory", metavar="OUT", help="the model's new folder")
    parser.add_argument(
        "--version",
        type=at_least(0),
        metavar="N",
        help="the version to merge (default: the newest)",
    )
    parser.add_argument(
        "--min-kept",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="write nothing if rounding leaves less of the adapter's change than this (0 to 1)",
    )
    add_trust(parser)
    add_json(parser, "print the shares that were kept as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Writes the merged model."""
    from deltawire.launch.adapters import merge_run

    split_version(arguments)
    merge_run(
        arguments.run,
        Path(arguments.directory),
        version=arguments.version,
        floor=arguments.min_kept,
        trust=trust_of(arguments),
        as_json=arguments.json,
    )
    return 0
