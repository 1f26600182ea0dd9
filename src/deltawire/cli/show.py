"""``deltawire show``: one version of a run, its step, its groups, and what changed."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_trust, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("show", help="describe a version: step, groups, rewards, changes")
    parser.set_defaults(call=run)
    parser.add_argument("run", metavar="RUN_URL[@V]", help="a version (default: the newest)")
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Describes the version."""
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.launch.branches.description import describe_version
    from deltawire.launch.branches.printing import print_version
    from deltawire.launch.branches.version_names import open_version

    found = describe_version(*open_version(arguments.run, trust_of(arguments)))
    if arguments.json:
        print(safe_json(found))  # noqa: T201
    else:
        print_version(found, Console(highlight=False, soft_wrap=True))
    return 0
