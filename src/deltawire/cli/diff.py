"""``deltawire diff``: what differs between the bits of two versions."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_trust, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("diff", help="compare the bits of two versions, also of two runs")
    parser.set_defaults(call=run)
    parser.add_argument("old", metavar="RUN_URL@V", help="a version of a run")
    parser.add_argument("new", metavar="RUN_URL[@V]", help="another version, or the newest")
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares them."""
    from rich.console import Console

    from deltawire.display import safe_json
    from deltawire.launch.branches.differences import compare_bits
    from deltawire.launch.branches.printing import print_bits
    from deltawire.launch.branches.version_names import open_version

    trust = trust_of(arguments)
    found = compare_bits(open_version(arguments.old, trust), open_version(arguments.new, trust))
    if arguments.json:
        print(safe_json(found))  # noqa: T201
    else:
        print_bits(found, Console(highlight=False, soft_wrap=True))
    return 0
