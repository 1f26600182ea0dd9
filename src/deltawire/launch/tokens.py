"""Reads bearer tokens, which are never passed on a command line."""

from __future__ import annotations

import os
from pathlib import Path

from deltawire.errors import InputError

TOKEN_VARIABLE = "DELTAWIRE_TOKEN"  # noqa: S105 - a variable's name
ADMIN_TOKEN_VARIABLE = "DELTAWIRE_ADMIN_TOKEN"  # noqa: S105
MAX_TOKEN_BYTES = 4096


def read_token(path: str, variable: str = TOKEN_VARIABLE) -> str:
    """Reads the bearer token from a file or the environment; empty if neither has one."""
    if not path:
        return os.environ.get(variable, "")
    try:
        with Path(path).open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read the token in {path}: {reason}") from error
    if not token or len(token) > MAX_TOKEN_BYTES or not token.isprintable():
        raise InputError(f"{path} holds no token", hint="write one line of printable characters")
    return token
