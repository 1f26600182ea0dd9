"""``deltawire tag``: names versions of a run, and keeps them from retention."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_key, add_trust, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("tag", help="name a version, and keep it from retention")
    parser.set_defaults(call=run)
    parser.add_argument("run", metavar="RUN_URL[@V]", help="a version (default: the newest)")
    parser.add_argument("name", nargs="?", metavar="NAME", help="without it, list the tags")
    parser.add_argument("--delete", action="store_true", help="remove the tag NAME")
    add_key(parser)
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Makes, removes or lists tags."""
    from deltawire.launch.branches.tagging import list_tags, remove, tag_version
    from deltawire.launch.role_keys import read_signer

    trust = trust_of(arguments)
    if arguments.name is None:
        list_tags(arguments.run, trust, delete=arguments.delete, as_json=arguments.json)
    elif arguments.delete:
        remove(arguments.run, arguments.name, trust, as_json=arguments.json)
    else:
        signer = read_signer(arguments.key)
        tag_version(arguments.run, arguments.name, trust, signer, as_json=arguments.json)
    return 0
