"""``deltawire log``: a run's versions, and which worker holds which."""

from __future__ import annotations

import argparse
import json

from deltawire.cli.arguments import add_json, add_run_url, add_trust, at_least, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("log", help="list a run's versions and who holds which")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--last", type=at_least(1), default=50, metavar="N", help="how many (default: 50)"
    )
    parser.add_argument(
        "--graph", action="store_true", help="draw the run with its forks, and theirs, instead"
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Lists the versions, newest first, or draws the forks."""
    from rich.console import Console

    from deltawire.dashboard.versions import list_readers, list_versions, version_table
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync import read_run

    bucket = open_trusted(arguments.run, trust_of(arguments))
    run = read_run(bucket)
    if arguments.graph:
        from deltawire.display import safe_json
        from deltawire.launch.branches.run_tree import drawn, tree_of

        tree = tree_of(bucket)
        if arguments.json:
            print(safe_json(tree))  # noqa: T201
        else:
            print("\n".join(drawn(tree)))  # noqa: T201
        return 0
    versions = list_versions(bucket, run, arguments.last)
    readers = list_readers(bucket)
    if arguments.json:
        print(json.dumps({"run": run.name, "versions": versions, "readers": readers}))  # noqa: T201
    else:
        Console(highlight=False).print(version_table(versions, readers))
    return 0
