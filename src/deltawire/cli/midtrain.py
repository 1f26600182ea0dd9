"""``deltawire midtrain``: next-token training over documents, published as a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli import run as whole_run
from deltawire.cli.arguments import BUCKET, add_job_options, add_seed, add_shape
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("midtrain", help="train on documents, before or between RL runs")
    parser.set_defaults(call=run, engine=None, dry_run=False, all=False, launcher="local")
    parser.add_argument(
        "config", metavar="CONFIG.toml", help="the configuration, with a [midtrain] section"
    )
    parser.add_argument("--out", default="", help="the run's folder (default: runs/NAME)")
    parser.add_argument("--bucket", default="", help=f"{BUCKET} (default: OUT/bucket)")
    add_seed(parser)
    add_shape(parser)
    add_job_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains to the last version; the same command continues a run that was interrupted."""
    from deltawire.config import load_config

    if load_config(Path(arguments.config)).midtrain is None:
        raise InputError(
            f"{arguments.config} has no [midtrain] section",
            hint="name streams of documents in it, or use deltawire run",
        )
    return whole_run.run(arguments)
