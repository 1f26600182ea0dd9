"""``deltawire keygen``: a key to sign a run with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deltawire.wire.signing import Ed25519Signer


def keygen(arguments: argparse.Namespace) -> int:
    """Write a fresh private key to a new file, and print the public key that belongs to it."""
    signer = Ed25519Signer.generate()
    signer.write(Path(arguments.file))
    body = json.dumps({"file": arguments.file, "public_key": signer.public_key})
    print(body if arguments.json else signer.public_key)  # noqa: T201
    return 0
