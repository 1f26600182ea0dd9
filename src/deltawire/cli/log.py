"""``deltawire log``: a run's versions, and which worker holds which."""

from __future__ import annotations

import argparse
import json

from deltawire.cli.arguments import add_json, add_public_key, add_run_url, at_least


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("log", help="list a run's versions and who holds which")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--last", type=at_least(1), default=50, metavar="N", help="how many (default: 50)"
    )
    add_public_key(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """List the versions, newest first."""
    from rich.console import Console

    from deltawire.dashboard.versions import list_readers, list_versions, version_table
    from deltawire.store import open_bucket
    from deltawire.sync import require_run

    bucket = open_bucket(arguments.run)
    run = require_run(bucket, public_key=arguments.public_key)
    versions = list_versions(bucket, run, arguments.last)
    readers = list_readers(bucket)
    if arguments.json:
        print(json.dumps({"run": run.name, "versions": versions, "readers": readers}))  # noqa: T201
    else:
        Console(highlight=False).print(version_table(versions, readers))
    return 0
