"""CORS: lets pages of listed origins call the server from a browser.

A page that calls the gateway itself holds its token, and can name any user: put a back end between
them where users must not be able to vote for others.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from aiohttp import web

from deltawire.errors import InputError

METHODS = "GET, POST, OPTIONS"
MAX_AGE_S = 600
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?\Z")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def check_origins(origins: Collection[str]) -> None:
    """Raises `InputError` for what no browser states as an origin: a path, a user, ``*``."""
    for origin in origins:
        if not _ORIGIN.match(origin):
            raise InputError(
                f"--cors-origin {origin[:200]!r} is no origin",
                hint="give scheme, host and port in lower case, such as https://app.example.com",
            )


def add_cors(app: web.Application, origins: Collection[str], *, exposed: Collection[str]) -> None:
    """Answers preflight requests of ``origins``, and marks all answers to them; pages may read the
    headers ``exposed``. Other origins get no such header, so a browser keeps answers from them."""
    if not origins:
        return
    listed = frozenset(origins)

    async def mark(request: web.Request, answer: web.StreamResponse) -> None:
        answer.headers.add("Vary", "Origin")
        origin = request.headers.get("Origin", "")
        if origin in listed:
            answer.headers["Access-Control-Allow-Origin"] = origin
            answer.headers["Access-Control-Expose-Headers"] = ", ".join(sorted(exposed))

    app.on_response_prepare.append(mark)
    app.middlewares.insert(0, _preflight(listed))


def _preflight(origins: frozenset[str]) -> Any:
    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("Access-Control-Request-Headers", "")
        is_preflight = (
            request.method == "OPTIONS"
            and request.headers.get("Origin", "") in origins
            and "Access-Control-Request-Method" in request.headers
        )
        if not is_preflight:
            return await handler(request)
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": asked[:1000],
                "Access-Control-Max-Age": str(MAX_AGE_S),
            },
        )

    return answer
