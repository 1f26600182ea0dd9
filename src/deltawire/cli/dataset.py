"""``deltawire dataset``: the trajectories of a run as Parquet files."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import add_json, add_run_url, add_trust, at_least, trust_of
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("dataset", help="write what a run was trained on as Parquet")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument("--to", required=True, metavar="DIR", help="the new folder of the files")
    parser.add_argument(
        "--first", type=at_least(1), default=1, metavar="N", help="from this version (default: 1)"
    )
    parser.add_argument(
        "--last", type=at_least(1), metavar="N", help="to this version (default: the newest)"
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the files."""
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.launch.branches.dataset import export_dataset
    from deltawire.launch.progress import counting
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync import newest_version, read_run

    if arguments.last is not None and arguments.last < arguments.first:
        raise InputError(f"--first {arguments.first} is above --last {arguments.last}")
    bucket = open_trusted(arguments.run, trust_of(arguments))
    run = read_run(bucket)
    last = newest_version(bucket) if arguments.last is None else arguments.last
    with counting(hidden=arguments.json) as show:
        found = export_dataset(
            bucket,
            run,
            Path(arguments.to),
            first=arguments.first,
            last=last,
            progress=lambda version: show("reading versions", version, last or version),
        )
    if arguments.json:
        print(safe_json(found))  # noqa: T201
        return 0
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"trajectories: {found.rows} of {found.groups} groups, {found.tokens} tokens, in "
        f"{', '.join(found.files[:4])}{' …' if len(found.files) > 4 else ''}"
    )
    console.print("every group was made again from the files, to the byte")
    if found.erased or found.deleted:
        console.print(
            f"groups left out: {found.erased} of forgotten users, {found.deleted} that retention "
            "deleted"
        )
    return 0
