"""``deltawire grant``: lets a key sign in a role of a signed run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deltawire.cli.arguments import add_json, add_run_url


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("grant", help="let a key sign in a role of a signed run")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "role",
        metavar="ROLE",
        help="worker-NAME, gateway, evaluator, reference, warm-start or trainer",
    )
    parser.add_argument(
        "granted", metavar="PUBLIC_KEY", help="what deltawire keygen printed; replaces another key"
    )
    parser.add_argument(
        "--key", required=True, metavar="FILE", help="the private key of the run's owner"
    )
    parser.add_argument(
        "--revoke",
        action="store_true",
        help="the earlier key was stolen: what it signed is void too (else gateways' answers and "
        "decisions stay valid)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stores the grant, and prints what the process of the role needs on its command line."""
    from deltawire.launch.role_keys import grant_by_owner

    pin = grant_by_owner(
        arguments.run,
        arguments.role,
        arguments.granted,
        owner=Path(arguments.key),
        revoke=arguments.revoke,
    )
    body = {"run": arguments.run, "role": arguments.role, "public_key": str(pin)}
    text = f"{arguments.role} may sign; start it with --key FILE --public-key {pin}"
    print(json.dumps(body) if arguments.json else text)  # noqa: T201
    return 0
