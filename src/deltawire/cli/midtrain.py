"""``deltawire midtrain``: next-token training over documents, published as a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli import run as whole_run
from deltawire.cli.arguments import BUCKET, add_json, add_key, add_seed, add_shape
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("midtrain", help="train on documents, before or between RL runs")
    parser.set_defaults(call=run, engine=None, dry_run=False, launcher="local")
    parser.add_argument(
        "config", metavar="CONFIG.toml", help="the configuration, with a [midtrain] section"
    )
    parser.add_argument("--out", default="", help="the run's folder (default: runs/NAME)")
    parser.add_argument("--bucket", default="", help=f"{BUCKET} (default: OUT/bucket)")
    add_seed(parser)
    add_shape(parser)
    add_key(parser)
    parser.add_argument(
        "--allow-rollback",
        action="store_true",
        help="with --key: continue from an older version than one seen on this machine before",
    )
    parser.add_argument("--plain", action="store_true", help="print lines, not a live view")
    add_json(parser, "print report.json at the end")


def run(arguments: argparse.Namespace) -> int:
    """Trains to the last version; the same command continues a run that was interrupted."""
    from deltawire.config import load_config

    if load_config(Path(arguments.config)).midtrain is None:
        raise InputError(
            f"{arguments.config} has no [midtrain] section",
            hint="name streams of documents in it, or use deltawire run",
        )
    return whole_run.run(arguments)
