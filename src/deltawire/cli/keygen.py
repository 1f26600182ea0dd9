"""``deltawire keygen``: a key to sign a run with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deltawire.cli.arguments import add_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("keygen", help="make a key to sign a run with")
    parser.set_defaults(call=run)
    parser.add_argument("file", metavar="FILE", help="the new file for the private key")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes a new private key, and prints its public key."""
    from deltawire.wire.signing import Ed25519Signer

    signer = Ed25519Signer.generate()
    signer.write(Path(arguments.file))
    body = json.dumps({"file": arguments.file, "public_key": signer.public_key})
    print(body if arguments.json else signer.public_key)  # noqa: T201
    return 0
