"""``deltawire live readmit`` and ``export``: one user's data."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_json, add_key, add_run_url, add_trust, add_user, trust_of
from deltawire.cli.exit_codes import UNKNOWN_USER

if TYPE_CHECKING:
    from deltawire.launch.live_users import UserOptions


def add_user_actions(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares both actions."""
    parser = actions.add_parser("readmit", help="allow the storage of a forgotten user again")
    parser.set_defaults(call=_readmit)
    _add_options(parser)
    add_json(parser)
    parser = actions.add_parser(
        "export",
        help="print all that is stored of a user, one JSON line each",
        description=f"Exit code {UNKNOWN_USER}: nothing is stored under this name.",
    )
    parser.set_defaults(call=_export)
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_run_url(parser)
    add_user(parser)
    add_key(parser)
    add_trust(parser)


def _options_of(arguments: argparse.Namespace) -> UserOptions:
    from deltawire.launch.live_users import UserOptions

    return UserOptions(
        trust=trust_of(arguments),
        key=arguments.key,
        secret=arguments.secret,
        without=arguments.without_gateway,
    )


def _readmit(arguments: argparse.Namespace) -> int:
    from deltawire.launch.live_users import readmit_by_name

    old = readmit_by_name(arguments.run, arguments.user, _options_of(arguments))
    if arguments.json:
        print(json.dumps({"readmitted": old}))  # noqa: T201
    else:
        print("the user may be stored again, under a new pseudonym")  # noqa: T201
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from deltawire.launch.live_users import export_by_name

    count = 0
    for row in export_by_name(arguments.run, arguments.user, _options_of(arguments)):
        print(json.dumps(row))  # noqa: T201
        count += 1
    if count:
        return 0
    print("unknown user: nothing is stored under this name", file=sys.stderr)  # noqa: T201
    return UNKNOWN_USER
