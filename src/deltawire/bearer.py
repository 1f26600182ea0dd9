"""Checks bearer tokens (RFC 6750) of the servers."""

from __future__ import annotations

import hmac


def bears(header: str, token: str) -> bool:
    """Returns whether the value of an ``Authorization`` header gives this token.

    The scheme may be written in any case (RFC 9110, section 11.1). No header gives an empty
    token. The time does not show where a wrong token differs.

    Example::

        bears(request.headers.get("Authorization", ""), token)
    """
    return hmac.compare_digest(token_in(header), token.encode()) and bool(token)


def token_in(header: str) -> bytes:
    """Returns the token that an ``Authorization`` header gives; empty if it gives none."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer":
        return b""
    # One space or more (RFC 7235, section 2.1); the rest is the token.
    return given.lstrip(" ").encode("utf-8", "surrogateescape")
