"""Asks servers over HTTP, with limits on what an answer may be."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Literal, TypeGuard

from deltawire.errors import InputError, RetryError

ANSWER_WITHIN_S = 60.0

TEMPORARY = frozenset({408, 425, 429, 502, 503, 504})
"""Status codes of a server that may answer later."""


class RefusedError(InputError):
    """A server refuses, with this ``status``."""

    status = 0


def is_http(location: object) -> TypeGuard[str]:
    """Returns whether a location is the address of an HTTP server."""
    return isinstance(location, str) and location.lower().startswith(("http://", "https://"))


def send(
    url: str,
    *,
    limit: int,
    token: str = "",
    body: bytes | None = None,
    method: Literal["POST", "PUT"] = "POST",
    hint: str = "",
) -> bytes:
    """Returns the answer to a GET request, to one of ``method`` if there is a ``body``, at most
    ``limit`` bytes. ``token`` is a bearer token, ``hint`` what to do if the server does not know
    the call.

    Raises `InputError` for another scheme, or if the server answers more, `RefusedError` if it
    refuses; `RetryError` if it does not answer, or refuses for the moment (`TEMPORARY`).
    """
    if not is_http(url):
        raise InputError(
            f"{url} is no address of a server", hint="it begins with http:// or https://"
        )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        verb = "GET" if body is None else method
        request = urllib.request.Request(url, body, headers, method=verb)  # noqa: S310  (http or https)
        with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S) as answer:  # noqa: S310
            data: bytes = answer.read(limit + 1)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in TEMPORARY:
            raise RetryError(f"{url} refuses for the moment: it answers {error.code}") from error
        refused = RefusedError(
            f"{url} answers {error.code}",
            hint="is it the right token?"
            if error.code in (401, 403)
            else hint or "is it the right address, and the right token?",
        )
        refused.status = error.code
        raise refused from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise RetryError(f"{url} does not answer: {reason}") from error
    if len(data) > limit:
        raise InputError(f"{url} answers more than {limit} bytes")
    return data
