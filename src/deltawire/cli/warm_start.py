"""``deltawire warm-start``: the supervised steps that make version 0."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import add_process_options, add_seed, child_options
from deltawire.cli.exit_codes import INTERRUPTED


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("warm-start", help="make version 0 with supervised steps")
    parser.set_defaults(call=run)
    parser.add_argument("config", metavar="CONFIG.toml", help="the run's configuration")
    parser.add_argument("--out", required=True, help="the model directory to write")
    parser.add_argument("--bucket", default="", help="record progress in this bucket")
    add_seed(parser)
    add_process_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Makes the model directory; 130 if interrupted before it was complete."""
    from deltawire.launch.processes import make_model, read_config

    config = read_config(Path(arguments.config), seed=arguments.seed)
    made = make_model(
        config, Path(arguments.out), bucket=arguments.bucket, options=child_options(arguments)
    )
    return 0 if made else INTERRUPTED
